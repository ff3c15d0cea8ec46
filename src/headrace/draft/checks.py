"""The known causes of low acceptance, one function each: ``Patient -> Finding``.

Where the mend can be tried on the spot (another boundary, the other feedback, the final norm applied), it is, and the
finding carries the acceptance length that it gains.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headrace.draft.data import Document
from headrace.draft.history import undertraining
from headrace.draft.metrics import implied_length
from headrace.draft.model import Eagle3Draft
from headrace.draft.patient import Finding, Patient, Verdict, mask_of
from headrace.types import Capture


def store_boundaries(patient: Patient) -> Finding:
    """Does each stored tap hold the boundary its spec says? (EX-05, EX-06)"""
    found = patient.rederived
    if found is None:
        return Finding(
            "store boundaries", "unknown", "the target cannot be run here", "run headrace verify where it can"
        )
    lines, wrong = [], []
    for plane, tap in enumerate(patient.taps):
        errors = found.errors(plane)
        nearest = int(np.argmin(errors))
        lines.append(
            f"tap {tap} is nearest to boundary {nearest} (relative error {errors[nearest]:.3f}, own {errors[tap]:.3f})"
        )
        # Neighbours differ by far more than rounding; a boundary that is merely as near as its own is no fault.
        if errors[nearest] < 0.5 * errors[tap]:
            wrong.append((tap, nearest))
    mend = f"the store holds boundaries {[n for _, n in wrong]} under the names {[t for t, _ in wrong]}; extract again and run headrace verify"
    return Finding(
        "store boundaries",
        "fault" if wrong else "ok",
        "; ".join(lines),
        mend if wrong else "",
        values={"wrong": wrong},
    )


def draft_boundaries(patient: Patient) -> Finding:
    """Would the drafter accept more if every tap were one boundary lower or higher? Then it was trained on those."""
    found = patient.rederived
    if found is None:
        return Finding("drafter boundaries", "unknown", "the target cannot be run here")
    lengths: dict[int, float] = {}
    for shift in (-1, 0, 1):
        taps = [tap + shift for tap in patient.taps]
        if min(taps) >= 0 and max(taps) <= patient.target.num_layers:
            lengths[shift] = patient.judge(found.documents(taps)).accuracy.length
    best = max(lengths, key=lambda shift: lengths[shift])
    gain = lengths[best] - lengths[0]
    measured = ", ".join(f"{shift:+d}: {length:.3f}" for shift, length in lengths.items())
    wrong = best != 0 and gain > 0.02
    mend = f"its taps are really {[t + best for t in patient.taps]}; import or train it with those"
    return Finding(
        "drafter boundaries",
        "fault" if wrong else "ok",
        f"acceptance length by shift {measured}",
        mend if wrong else "",
        gain if wrong else 0.0,
        {"lengths": lengths},
    )


def final_norm(patient: Patient) -> Finding:
    """Is the stored final state normed as its spec says? A normed state less its weight has size 1, token by token. (EX-07)"""
    sizes = torch.cat([_unweighted_sizes(patient, capture.states[-1]) for capture in patient.few])
    off = float((sizes - 1).abs().median())
    normed, said = off < 0.03, patient.draft.spec.final_normed
    measured = (
        f"the spec says {'after' if said else 'before'} the norm; without the norm's weight the states have size 1 +- {off:.3f}, "
        f"so they are {'after' if normed else 'before'} it"
    )
    mend = "the targets it learned from are wrong; extract again (headrace verify shows it), then train again"
    wrong = normed != said
    return Finding(
        "final norm", "fault" if wrong else "ok", measured, mend if wrong else "", values={"off": off}
    )


def _unweighted_sizes(patient: Patient, states: Tensor) -> Tensor:
    """Root mean square of states [L, H] with the final norm's weight and bias taken out, [L]."""
    norm, hidden = patient.target.final_norm, states.shape[-1]
    # What a norm does to vectors it should leave alone tells its bias and weight, whatever its kind.
    ones = torch.ones(hidden)
    alternating = 1.0 - 2.0 * (torch.arange(hidden) % 2)
    if patient.draft.spec.norm_kind == "layernorm":
        bias = norm(ones)
        weight = (norm(alternating) - bias) * alternating
    else:
        bias, weight = torch.zeros(hidden), norm(ones)
    return ((states.float() - bias) / weight).pow(2).mean(-1).sqrt()


def mask_share(patient: Patient) -> Finding:
    """How much of the data is supervised, and are there rows with nothing? (DP-01, DP-04)"""
    masks = [mask_of(c) for c in patient.captures]
    share = float(np.concatenate(masks).mean())
    empty = sum(not m.any() for m in masks)
    full = sum(bool(m.all()) for m in masks)
    measured = (
        f"{share:.1%} of tokens supervised; {empty} rows with none, {full} rows with all of {len(masks)}"
    )
    if empty == len(masks) or full > len(masks) / 2 or share > 0.98:
        return Finding(
            "mask share",
            "fault",
            measured,
            "the loss mask was not derived from the conversations; look at headrace show and prepare again",
            values={"share": share},
        )
    verdict: Verdict = "suspect" if empty or share < 0.05 else "ok"
    return Finding(
        "mask share",
        verdict,
        measured,
        "prompts outweigh answers; prepare with more or longer answers" if verdict != "ok" else "",
        values={"share": share},
    )


def _nothing_to_judge(name: str) -> Finding:
    """A mean over nothing would pass every threshold."""
    return Finding(name, "suspect", "no supervised token to judge by", "see mask share")


def coverage(patient: Patient) -> Finding:
    """What does the draft vocabulary lack? Every label outside it is a miss. (TR-08)"""
    if not len(patient.agreement["sayable"]) or not len(patient.agreement["label_sayable"]):
        return _nothing_to_judge("vocabulary coverage")
    sayable, labels = patient.agreement["sayable"].mean(), patient.agreement["label_sayable"].mean()
    accuracy = patient.whole.accuracy
    gain = accuracy.length and implied_length(accuracy.conditional_in_vocab) - accuracy.length
    measured = f"covers {sayable:.2%} of the text and {labels:.2%} of the target's best tokens; length {accuracy.length:.3f}, {accuracy.length + gain:.3f} were all covered"
    verdict: Verdict = "fault" if labels < 0.9 else "suspect" if labels < 0.97 else "ok"
    mend = "train with a larger --shape.vocab, chosen on data like this" if verdict != "ok" else ""
    return Finding(
        "vocabulary coverage",
        verdict,
        measured,
        mend,
        gain if verdict != "ok" else 0.0,
        {"text": float(sayable), "labels": float(labels)},
    )


def vocabulary_map(patient: Patient) -> Finding:
    """Does each row of the drafter's head belong to the token that d2t names? (TR-09, XP-01)"""
    model = patient.draft.model
    ids = model.to_target(torch.arange(model.config.draft_vocab_size, device=model.d2t.device)).cpu()
    mine, theirs = model.lm_head.weight.float().cpu(), patient.target.head.weight.float()
    chosen = torch.linspace(0, len(ids) - 1, min(len(ids), 512)).long()
    named = torch.cosine_similarity(mine[chosen], theirs[ids[chosen]], dim=-1).mean()
    shifted = torch.cosine_similarity(mine[chosen], theirs[ids[(chosen + 7) % len(ids)]], dim=-1).mean()
    measured = (
        f"head rows resemble their token's rows in the target by {named:.3f} (other tokens' by {shifted:.3f})"
    )
    wrong = bool(named < shifted + 0.05)
    mend = "d2t does not belong to this lm_head: every proposal is another token; export or import it again with its own map"
    return Finding(
        "vocabulary map",
        "fault" if wrong else "ok",
        measured,
        mend if wrong else "",
        values={"named": float(named), "others": float(shifted)},
    )


def off_policy(patient: Patient) -> Finding:
    """Did this target write the text? (TR-22)"""
    if not len(patient.agreement["best"]):
        return _nothing_to_judge("on-policy data")
    best = float(patient.agreement["best"].mean())
    perplexity = float(np.exp(-patient.agreement["log_prob"].mean()))
    measured = f"{best:.1%} of supervised tokens are the target's best; perplexity {perplexity:.2f}"
    verdict: Verdict = (
        "fault" if best < 0.4 or perplexity > 20 else "suspect" if best < 0.6 or perplexity > 5 else "ok"
    )
    mend = "the target did not write these answers: numbers on them say little, and training on them teaches another model's text; use headrace regenerate"
    return Finding(
        "on-policy data",
        verdict,
        measured,
        mend if verdict != "ok" else "",
        values={"best": best, "perplexity": perplexity},
    )


def feedback(patient: Patient) -> Finding:
    """Would the other feedback (normed or not) accept more? Then the flag is wrong. (TR-07, XP-09)"""
    config = patient.draft.model.config
    other = Eagle3Draft(config.model_copy(update={"normed_feedback": not config.normed_feedback}))
    other.load_state_dict(patient.draft.model.state_dict(), assign=True)
    other.to(patient.machine.device).eval()
    mine, theirs = (
        patient.sample.accuracy.length,
        patient.judge(patient.documents(patient.few, patient.order), other).accuracy.length,
    )
    wrong = theirs > mine + 0.02
    measured = f"length {mine:.3f} with {'normed' if config.normed_feedback else 'plain'} feedback, {theirs:.3f} with the other"
    mend = f"set normed_feedback to {not config.normed_feedback}: it was trained so"
    return Finding(
        "feedback",
        "fault" if wrong else "ok",
        measured,
        mend if wrong else "",
        theirs - mine if wrong else 0.0,
        {"other": theirs},
    )


def length(patient: Patient) -> Finding:
    """Are rows here longer than those it was trained on, and does accuracy fall there? (XP-06)"""
    longest = max(len(c.ids) for c in patient.captures)
    trained = int(dict(patient.draft.lineage.get("data") or {}).get("longest_row", 0))
    limit = patient.draft.model.config.max_positions
    if longest > limit:
        return Finding(
            "length",
            "fault",
            f"rows reach {longest} tokens, the drafter's positions end at {limit}",
            "set max_positions to the served context and train on long rows",
        )
    half = sorted(patient.captures, key=lambda c: len(c.ids))[len(patient.captures) // 2 :]
    accuracies = _by_position(patient, half[-8:])
    early, late = accuracies
    verdict: Verdict = "suspect" if (trained and longest > 1.25 * trained) or (late < 0.8 * early) else "ok"
    measured = f"longest row {longest}, longest trained {trained or 'unknown'}; accuracy {early:.3f} in the first and {late:.3f} in the second half of the longest rows"
    return Finding(
        "length",
        verdict,
        measured,
        "train on rows as long as those that are served" if verdict != "ok" else "",
        values={"longest": longest, "early": early, "late": late},
    )


def training(patient: Patient) -> Finding:
    """Had it stopped improving? (undertraining)"""
    verdict, measured, mend = undertraining(patient.draft.lineage, patient.folder)
    return Finding("training", verdict, measured, mend)


CHECKS: tuple[Callable[[Patient], Finding], ...] = (
    store_boundaries,
    draft_boundaries,
    final_norm,
    feedback,
    vocabulary_map,
    coverage,
    off_policy,
    mask_share,
    length,
    training,
)


def _by_position(patient: Patient, captures: list[Capture]) -> tuple[float, float]:
    """First-step accuracy over starts in the first and the second half of each row."""
    halves = []
    for second in (False, True):
        documents = []
        for capture in captures:
            mask = mask_of(capture).copy()
            middle = len(mask) // 2
            mask[: middle if second else 0] = False
            mask[len(mask) if second else middle :] = False
            documents.append(Document(capture.ids, mask, capture.states[patient.order]))
        halves.append(patient.judge(documents).accuracy.marginal[0])
    return halves[0], halves[1]
