// A busy page can leave a widget deaf: anywidget gives a model two seconds to initialise, and when that was too short it
// drops every message from the kernel for good, while the view appears and its own messages are sent. The messages are
// then taken from the channel itself.

import type { Model } from "./protocol";

interface HostModel {
  comm?: { on_msg(callback: (message: unknown) => void): void };
}

type Handler = (this: HostModel, message: unknown) => unknown;

/** Hear the kernel again, past the host's wait. Does nothing where the host is built in another way. */
export function revive(model: Model): void {
  const host = hostOf(model);
  const own = host && Object.getPrototypeOf(host);
  const handle = own && (Object.getPrototypeOf(own) as { _handle_comm_msg?: Handler })._handle_comm_msg;
  if (!host?.comm || typeof host.comm.on_msg !== "function" || typeof handle !== "function") return;
  host.comm.on_msg((message) => handle.call(host, message));
}

/** The notebook's own model behind the stand-in: it is what a change is announced with. */
function hostOf(model: Model): HostModel | undefined {
  let host: HostModel | undefined;
  const take = (changed: HostModel) => {
    host = changed;
  };
  model.on("change:_probe", take);
  model.set("_probe", {});
  model.off("change:_probe", take);
  return host;
}
