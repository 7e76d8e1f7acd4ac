"""Is the model hub there? Asked before its client is, since that goes on trying for a minute without a network."""

import logging
import socket
import threading

from rlkit.env import hub_address, hub_is_off

__all__ = ["REACH_TIMEOUT_S", "hub_is_reachable"]

REACH_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


def hub_is_reachable() -> bool:
    """True when a connection to the hub (or to the proxy in front of it) opens within `REACH_TIMEOUT_S`.

    False without trying when the user has told the Hugging Face libraries to stay off the network.
    """
    if hub_is_off():
        return False
    address = hub_address()
    answered = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=REACH_TIMEOUT_S).close()
            answered.set()
        except OSError as error:
            logger.info("the hub at %s:%d cannot be reached: %s", *address, error)

    # Name resolution has no time limit of its own, so it gets a thread that may be left behind.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(REACH_TIMEOUT_S)
    return answered.is_set()
