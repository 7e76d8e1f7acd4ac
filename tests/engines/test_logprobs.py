"""Scores of responses against a plain forward of each sequence alone, in float64 where it helps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlkit.engines import logprobs
from rlkit.engines.forward import evaluation_mode
from rlkit.engines.logprobs import response_scores, response_states
from rlkit.errors import ModelError
from tests.generation.models import Recurrent, WithoutCache, family_model
from tests.tiny import tiny_model

FAMILIES = ["llama", "qwen3", "gpt2"]  # rotary, rotary with normalised heads, absolute positions
PROMPT_LENGTHS, RESPONSE_LENGTHS = [4, 2, 1, 3], [3, 5, 1, 2]


def batch(left: int = 0, right: int = 0, pad: int = 2) -> tuple[Tensor, Tensor, int]:
    """Ids (4, L), full mask (4, L) and prompt width; prompts padded on the left, responses on the right."""
    width, longest = max(PROMPT_LENGTHS) + left, max(RESPONSE_LENGTHS) + right
    generator = torch.Generator().manual_seed(0)
    ids = torch.full((4, width + longest), pad)
    mask = torch.zeros(4, width + longest, dtype=torch.bool)
    for row, (p, t) in enumerate(zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)):
        ids[row, width - p : width + t] = torch.randint(0, 48, (p + t,), generator=generator)
        mask[row, width - p : width + t] = True
    return ids, mask, width


def alone(model: Any, temperature: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per row: log-probs (t,), entropies (t,), states (t, H) from a forward of that sequence without any padding."""
    ids, mask, _ = batch()
    rows = []
    for row, (p, t) in enumerate(zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)):
        tokens = ids[row][mask[row]][None]
        with torch.no_grad():
            output = model(tokens, output_hidden_states=True)
        log_probs = (output.logits[0, p - 1 : p + t - 1].double() / temperature).log_softmax(-1)
        chosen = log_probs.gather(-1, tokens[0, p:, None]).squeeze(-1)
        rows.append((chosen, -(log_probs.exp() * log_probs).sum(-1), output.hidden_states[-1][0, p - 1 : p + t - 1]))
    return rows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("left", "right", "pad"), [(0, 0, 2), (6, 0, 2), (0, 3, 7), (5, 4, 0)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_each_sequence_alone(
    family: str, left: int, right: int, pad: int, temperature: float
) -> None:
    model = family_model(family)
    ids, mask, width = batch(left, right, pad)
    with torch.no_grad():
        scores = response_scores(model, ids, mask, width, temperature, entropy="value", hidden=True)
    assert scores.logprobs.dtype == torch.float32
    assert scores.entropy is not None
    assert scores.hidden is not None
    for row, (chosen, entropies, states) in enumerate(alone(model, temperature)):
        t = RESPONSE_LENGTHS[row]
        torch.testing.assert_close(scores.logprobs[row, :t].double(), chosen, atol=1e-4, rtol=0)
        torch.testing.assert_close(scores.entropy[row, :t].double(), entropies, atol=1e-4, rtol=0)
        torch.testing.assert_close(scores.hidden[row, :t], states, atol=1e-4, rtol=0)
        assert scores.logprobs[row, t:].tolist() == [0] * (scores.logprobs.shape[1] - t)
        assert not scores.entropy[row, t:].any()
        assert not scores.hidden[row, t:].any()
    torch.testing.assert_close(response_states(model, ids, mask, width), scores.hidden)


def test_the_state_before_a_token_does_not_know_it() -> None:
    """State t stays the same when token t changes, and state t + 1 does not."""
    model = tiny_model()
    ids, mask, width = batch()
    changed = ids.clone()
    changed[0, width + 1] = (changed[0, width + 1] + 1) % 48
    with torch.no_grad():
        before, after = (response_states(model, tokens, mask, width) for tokens in (ids, changed))
    assert torch.equal(before[0, :2], after[0, :2])
    assert not torch.allclose(before[0, 2], after[0, 2])


def test_the_value_of_padding_does_not_matter() -> None:
    model = tiny_model()
    ids, mask, width = batch()
    noisy = torch.where(mask, ids, torch.randint(0, 48, ids.shape))
    with torch.no_grad():
        scores, other = (response_scores(model, tokens, mask, width) for tokens in (ids, noisy))
    torch.testing.assert_close(scores.logprobs, other.logprobs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("entropy", [None, "value", "differentiable"])
def test_gradients_equal_those_of_the_plain_formula(entropy: Any) -> None:
    ids, mask, width = batch()
    coefficient = 0.0 if entropy != "differentiable" else 0.3
    model, reference = tiny_model(), tiny_model()
    scores = response_scores(model, ids, mask, width, 0.8, entropy=entropy)
    loss = scores.logprobs.sum()
    if scores.entropy is not None:
        assert scores.entropy.requires_grad == (entropy == "differentiable")
        loss = loss + coefficient * scores.entropy.sum()
    loss.backward()
    positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
    logits = reference(ids, attention_mask=mask.long(), position_ids=positions).logits[:, width - 1 : -1] / 0.8
    log_probs = logits.log_softmax(-1)
    chosen = log_probs.gather(-1, ids[:, width:, None]).squeeze(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    ((chosen + coefficient * entropies) * mask[:, width:]).sum().backward()
    for (name, got), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_gradients_reach_a_trunk_through_the_hidden_states() -> None:
    model = tiny_model()
    ids, mask, width = batch()
    hidden = response_scores(model, ids, mask, width, hidden=True).hidden
    assert hidden is not None
    hidden.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_the_output_head_sees_response_tokens_only() -> None:
    model = tiny_model()
    ids, mask, width = batch(right=4)
    seen: list[int] = []
    with torch.no_grad():
        response_scores(model, ids, mask, width)  # the first time, the head is also tried on one state
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.numel() // 48))
        response_scores(model, ids, mask, width)
        assert sum(seen) == sum(RESPONSE_LENGTHS)
        response_states(model, ids, mask, width)
    assert sum(seen) == sum(RESPONSE_LENGTHS)
    assert not model.lm_head._forward_pre_hooks


def test_the_head_is_left_alone_after_an_error() -> None:
    model = tiny_model()
    ids, mask, width = batch()
    with pytest.raises(IndexError):
        response_scores(model, ids + 1000, mask, width)
    assert not model.lm_head._forward_pre_hooks


def test_repeated_and_split_forwards_agree_so_that_the_first_ratio_is_one() -> None:
    """Dropout 0.1, weights untouched: equal shapes give equal bits, other micro-batches 1e-5, in training mode too."""
    model = family_model("gpt2").train()
    assert any(isinstance(m, nn.Dropout) and m.p == 0.1 for m in model.modules())
    ids, mask, width = batch()

    def score(rows: slice) -> Tensor:
        with evaluation_mode(model):
            return response_scores(model, ids[rows], mask[rows], width).logprobs

    with torch.no_grad():
        before = score(slice(None))
    update = score(slice(None))
    assert (update - before).abs().max().item() == 0
    split = torch.cat([score(slice(row, row + 1)) for row in range(4)])
    assert (split - before).abs().max().item() <= 1e-5
    assert model.training


def test_logits_scaled_by_the_model_are_scored_as_it_gives_them() -> None:
    """Families that change logits after the head (here: a soft cap) are scored with that change."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            sliding_window=32,
            final_logit_softcapping=0.5,
            initializer_range=0.5,
        )
    ).eval()
    ids, mask, width = batch()
    with torch.no_grad():
        scores = response_scores(model, ids, mask, width)
    for row, (chosen, _, _) in enumerate(alone(model, 1.0)):
        torch.testing.assert_close(scores.logprobs[row, : RESPONSE_LENGTHS[row]].double(), chosen, atol=1e-4, rtol=0)


def test_plain_modules_are_scored_from_their_logits() -> None:
    ids, mask, width = batch(left=2)
    with torch.no_grad():
        wrapped = response_scores(WithoutCache(), ids, mask, width, 0.9, entropy="value")
        direct = response_scores(tiny_model(), ids, mask, width, 0.9, entropy="value")
    torch.testing.assert_close(wrapped.logprobs, direct.logprobs, atol=1e-6, rtol=0)
    torch.testing.assert_close(wrapped.entropy, direct.entropy, atol=1e-6, rtol=0)


def test_a_module_that_names_no_head_cannot_give_states() -> None:
    ids, mask, width = batch()
    for call in (
        lambda: response_scores(Recurrent(), ids, mask, width, hidden=True),
        lambda: response_states(Recurrent(), ids, mask, width),
    ):
        with pytest.raises(ModelError, match=r"Recurrent does not say .* get_output_embeddings"):
            call()


def test_impossible_tokens_leave_the_entropy_finite() -> None:
    class Masked(nn.Module):
        """Excludes half of the vocabulary."""

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            logits = torch.zeros(*input_ids.shape, 4)
            logits[..., 2:] = float("-inf")
            return logits

    ids, mask = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)
    scores = response_scores(Masked(), ids, mask, 1, entropy="value")
    assert scores.entropy is not None
    assert scores.entropy.tolist() == [pytest.approx([0.6931, 0.6931], abs=1e-4)]
    assert scores.logprobs.tolist() == [pytest.approx([-0.6931, -0.6931], abs=1e-4)]


def groups(seed: int) -> tuple[Tensor, Tensor, int]:
    """Two prompts of three responses each, one of a single token: ids (6, 9), mask, prompt width."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 40, (6, 9), generator=rng)
    ids[:3, :4], ids[3:, :4] = ids[0, :4].clone(), ids[3, :4].clone()
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[:3, :2] = False
    mask[1, 5:] = mask[4, 8:] = False
    return ids, mask, 4


def everything(model: nn.Module, ids: Tensor, mask: Tensor, width: int) -> list[Tensor]:
    """Log-probs, entropies, states, and the gradient of every weight under a loss of all three."""
    model.zero_grad()
    scores = response_scores(model, ids, mask, width, temperature=0.7, entropy="differentiable", hidden=True)
    assert scores.entropy is not None
    assert scores.hidden is not None
    (scores.logprobs.sum() + 0.1 * scores.entropy.sum() + 0.01 * scores.hidden.square().sum()).backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return [scores.logprobs.detach(), scores.entropy.detach(), scores.hidden.detach(), gradients]


@pytest.mark.parametrize("family", ["llama", "llama-long", "mistral", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("rows", [groups(0), groups(1), batch(2, 3)], ids=["groups", "other groups", "no groups"])
def test_rows_laid_end_to_end_give_what_padded_rows_give(
    family: str, rows: tuple[Tensor, Tensor, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts once a group as well as whole sequences, gradients included."""
    model = family_model(family)
    assert logprobs.packs(model)
    packed = everything(model, *rows)
    monkeypatch.setattr(logprobs, "packs", lambda model: False)
    for one, other in zip(packed, everything(model, *rows), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        assert one.abs().sum() > 0


def test_logits_in_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of logits at a time, computed again for the gradient, against all at once."""
    model = tiny_model()
    whole = everything(model, *groups(0))
    monkeypatch.setattr(logprobs, "_LOGITS", {"cpu": 4 * 48})
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.numel() // 48))
    for one, other in zip(everything(model, *groups(0)), whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert max(seen) == 4
    assert sum(seen) == 2 * int(groups(0)[1][:, 4:].sum())


def test_the_attention_of_a_model_is_its_own_again_after_a_packed_forward() -> None:
    model = tiny_model()
    before = model.config._attn_implementation
    ids, mask, width = batch()
    response_scores(model, ids, mask, width)
    assert model.config._attn_implementation == before
    with pytest.raises(IndexError):
        response_scores(model, ids + 1000, mask, width)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", ["mistral-window", "recurrent"])
def test_models_that_cannot_be_packed_are_run_padded(family: str) -> None:
    assert not logprobs.packs(Recurrent() if family == "recurrent" else family_model(family))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2", "granite", "mistral-window"])
def test_logits_of_the_last_token_are_those_of_each_row_alone(family: str) -> None:
    """Caps and scales after the output head included."""
    model = family_model(family)
    ids, mask, _ = batch(2, 3)
    ids, mask = ids[:, 2:], torch.arange(ids.shape[1] - 2) < torch.arange(1, len(ids) + 1).unsqueeze(1)
    with torch.no_grad():
        alone = [model(row[own][None]).logits[0, -1] for row, own in zip(ids, mask, strict=True)]
        torch.testing.assert_close(logprobs.last_logits(model, ids, mask), torch.stack(alone), rtol=1e-4, atol=1e-4)
