"""A guess at why two sides part, from the first stage that differs, and from reruns with deliberate faults.

Each kind of guess is provoked by a test (tests/runtime/test_parity_causes.py). A guess is no proof: the evidence is
printed with it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from runtime.compare import measure
from runtime.compare_audio import AudioMetrics
from runtime.errors import MossError
from runtime.parity_faults import Engine, find_fault
from runtime.parity_record import Recording, Trace
from runtime.parity_stages import Common
from runtime.parity_verdict import Cause, Mode, Stage, Verdict
from runtime.sampling import choose_code, draw_uniforms

__all__ = ["Engine", "find_cause"]

# Relative error of a hidden state after 12 layers, measured with run-om precision at full size (docs/parity.md):
# fp16 5.0e-3 (5.9e-3 at most), bf16 3.4e-2 (3.9e-2), float32 7.5e-6.
HALF_ERROR, BFLOAT_ERROR = 8e-3, 6e-2
SEEDS_TO_TRY = 100
_HIDDEN = ("prefill hidden", "prefill cache", "step hidden")
_LOGITS = ("slot logits", "code logits")
_NUMERIC = (*_HIDDEN, *_LOGITS, "codec latents", "waveform")


def find_cause(
    a: Recording,
    b: Recording,
    common: Common,
    stages: tuple[Stage, ...],
    modes: tuple[Mode, ...],
    audio: AudioMetrics | None,
    engine: Engine | None,
) -> Cause | None:
    """The guess for the first thing that is not in agreement; None when nothing speaks for one."""
    bad = (Verdict.DIVERGENT, Verdict.ERROR)
    stage = next((s for s in stages if s.verdict in bad), None)
    by_choice = (c for m in modes if m.verdict in bad and (c := _of_mode(m, a, b)) is not None)
    if stage is None:
        return next(by_choice, None)
    if stage.text.startswith("NaN"):
        return Cause("overflow", "a value overflowed, or memory was read that nobody wrote", stage.text)
    hashes = {a.identity.weights, b.identity.weights}
    if len(hashes - {""}) > 1 and (stage.name in _NUMERIC or stage.name == "reference codes"):
        evidence = f"weights.bin: sha256 {a.identity.weights[:12]}… against {b.identity.weights[:12]}…"
        return Cause("weights", "the sides have different weights", evidence)
    of_stage: dict[str, Callable[[], Cause | None]] = {
        **dict.fromkeys(("token ids", "prompt rows"), lambda: _of_prompt(a, b, stage)),
        "reference codes": lambda: _of_reference(a, b),
        **dict.fromkeys(_HIDDEN, lambda: _of_hidden(a, b, common, stage, engine)),
        **dict.fromkeys(
            _LOGITS, lambda: _swapped_codebooks(common) or _by_level(stage, "the local transformer differs")
        ),
        "codes": lambda: _late_codebook(common) or next(by_choice, None),
    }
    return of_stage.get(stage.name, lambda: _of_audio(stage, audio))()


def _of_prompt(a: Recording, b: Recording, stage: Stage) -> Cause:
    if stage.name == "token ids":
        if a.identity.tokenizer != b.identity.tokenizer:
            return Cause("tokenizer", "the sides have different tokenizers", "tokenizer files with different sha256")
        return Cause("text", "the text was prepared differently before it was tokenised", stage.text)
    if len(a.rows) != len(b.rows):
        longer, shorter, name = (a.rows, b.rows, "b") if len(a.rows) > len(b.rows) else (b.rows, a.rows, "a")
        if np.array_equal(longer[1:], shorter):
            text = f"{name} leaves out the leading im_start: it builds the prompt of the published ONNX packages"
            return Cause("template", text, f"templates {a.identity.template} and {b.identity.template}")
    return Cause("template", "the prompts are built differently", stage.text)


def _of_reference(a: Recording, b: Recording) -> Cause:
    first, second = a.reference_codes, b.reference_codes
    if first is None or second is None or first.shape != second.shape:
        return Cause("clip", "the sides read or resampled the clip differently", "codes of different length")
    shares = (first == second).mean(axis=0)
    evidence = "equal codes per codebook: " + ", ".join(f"{s:.0%}" for s in shares)
    half = len(shares) // 2
    if shares[:1].mean() > 0.9 and shares[half:].mean() < shares[:half].mean():
        text = "the precision of the encoder: what is left over grows in error from codebook to codebook"
        return Cause("precision", f"{text}; keep the quantizer in float32", evidence)
    return Cause("encoder", "the encoders differ from the first codebook on", evidence)


def _of_hidden(a: Recording, b: Recording, common: Common, stage: Stage, engine: Engine | None) -> Cause:
    relative = stage.metrics.relative if stage.metrics is not None else None
    if relative is not None and relative <= BFLOAT_ERROR and stage.name != "step hidden":
        return _precision(relative)
    if engine is not None and common.source.startswith("replay"):
        other, trace = (b, common.b) if engine.side == "a" else (a, common.a)
        if trace.hidden is not None:
            cause = _by_fault(engine, a, trace.hidden, other.identity.capacity)
            if cause is not None:
                return cause
    scaled = _scale(common)
    if scaled is not None:
        return scaled
    if stage.name == "step hidden":
        text = "what only a step does: position, cache rows, mask, the row that is fed back, or its precision"
        evidence = f"the prefill agrees, the steps do not (relative error {relative}), and no fault that was tried fits"
        return Cause("step", text, evidence)
    return Cause("weights", "different weights, or another graph", f"relative error {relative}: not a rounding")


def _by_fault(engine: Engine, fed: Recording, other: npt.NDArray[np.float32], capacity: int) -> Cause | None:
    try:
        match = find_fault(engine, fed.replay_rows, fed.replay_codes, other, capacity)
    except MossError:  # the guess cannot be tested here; the verdict stands without it
        return None
    if match is None:
        return None
    name = "b" if engine.side == "a" else "a"
    evidence = (
        f"{engine.side} rerun with this fault comes within {match.error:.2g} of {name} (relative), "
        f"without it {match.error_without:.2g}"
    )
    return Cause(match.fault.kind, f"on side {name}, {match.fault.text}", evidence)


def _precision(relative: float) -> Cause:
    name = "float16 or HF32" if relative <= HALF_ERROR else "bfloat16"
    return Cause("precision", f"one side computes in reduced precision ({name})", f"relative error {relative:.2g}")


def _by_level(stage: Stage, otherwise: str) -> Cause:
    relative = stage.metrics.relative if stage.metrics is not None else None
    if relative is not None and relative <= BFLOAT_ERROR:
        return _precision(relative)
    return Cause("weights", otherwise, f"relative error {relative}")


def _scale(common: Common) -> Cause | None:
    """Whether b is a times one number."""
    if common.a.hidden is None or common.b.hidden is None or common.a.hidden.shape[1:] != common.b.hidden.shape[1:]:
        return None
    a, b = common.a.hidden[: common.frames].astype(np.float64), common.b.hidden[: common.frames].astype(np.float64)
    power = float(np.sum(a * a))
    factor = float(np.sum(a * b)) / power if power else 0.0
    metrics = measure(a * factor, b)
    if abs(factor - 1) < 1e-3 or metrics.relative is None or metrics.relative > 1e-3:
        return None
    return Cause("scale", f"b is a times {factor:.4g}", f"relative error after scaling {metrics.relative:.2g}")


def _swapped_codebooks(common: Common) -> Cause | None:
    """Whether the rows of b's first frame are a's in another order."""
    if common.a.code_logits is None or common.b.code_logits is None:
        return None
    a, b = common.a.code_logits[0].astype(np.float64), common.b.code_logits[0].astype(np.float64)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    gaps = np.linalg.norm(a[None] - b[:, None], axis=-1) / max(float(np.linalg.norm(a, axis=-1).mean()), 1e-30)
    order = gaps.argmin(axis=1)  # b's codebook q is a's codebook order[q]
    moved = [q for q in range(len(order)) if order[q] != q and gaps[q, order[q]] < 1e-2]
    if len(moved) < 2:
        return None
    pairs = ", ".join(f"b's {q} is a's {order[q]}" for q in moved[:4])
    return Cause(
        "codebooks", "codebooks are swapped", f"{pairs} (relative error {gaps[moved, order[moved]].max():.2g})"
    )


def _late_codebook(common: Common) -> Cause | None:
    """Whether single codebooks of b are a's, one frame late or early."""
    a, b = common.a.codes[: common.frames], common.b.codes[: common.frames]
    if len(a) < 6:
        return None
    found = []
    for q in np.flatnonzero((a != b).any(axis=0)):
        if len(np.unique(a[:, q])) < 3:
            continue
        for name, x, y in (("late", a[:-1, q], b[1:, q]), ("early", a[1:, q], b[:-1, q])):
            if (x == y).mean() > 0.9:
                found.append(f"codebook {q} is one frame {name}")
    return (
        Cause("codebooks", "; ".join(found[:4]), "its codes are a's codes of the neighbouring frame") if found else None
    )


def _of_mode(mode: Mode, a: Recording, b: Recording) -> Cause | None:
    """A free run parts although the stages agree: the choice itself, or what only a free run does."""
    first = mode.first
    if first is None or first.tie:
        return None
    if a.plan.seed != b.plan.seed or a.plan.sampling != b.plan.sampling:
        text = "the sides were asked for different seeds or sampling settings"
        return Cause("seed", text, f"seeds {a.plan.seed} and {b.plan.seed}")
    if first.a_follows and first.b_follows:
        return Cause(
            "state", "the logits differ: what the run kept from the frames before", f"by {first.logit_gap:.3g}"
        )
    side, recording = ("b", b) if not first.b_follows else ("a", a)
    if mode.name == "seeded" and mode.name in recording.traces:
        seed = _other_seed(recording.traces[mode.name], recording)
        if seed is not None:
            text = f"side {side} drew the uniform numbers of another seed"
            return Cause("seed", text, f"every code of its first frame follows from the uniforms of seed {seed}")
    text = f"side {side} chooses by another rule, or with other uniform numbers or another seen-table"
    return Cause("sampling", text, f"its choice at {first.where} does not follow from its own logits")


def _other_seed(trace: Trace, recording: Recording) -> int | None:
    """The seed whose uniforms explain all codes of the first frame, if it is not the one that was asked for."""
    if trace.code_logits is None:
        return None
    logits, codes = trace.code_logits[0], trace.codes[0]
    unseen = np.zeros(logits.shape[1], np.float32)
    for seed in range(SEEDS_TO_TRY):
        u = draw_uniforms(np.random.default_rng(seed), len(codes))[0]
        chosen = (choose_code(x, unseen, float(v), recording.plan.sampling) for x, v in zip(logits, u[1:], strict=True))
        if all(c == k for c, k in zip(codes, chosen, strict=True)):
            return seed if seed != recording.plan.seed else None
    return None


def _of_audio(stage: Stage, audio: AudioMetrics | None) -> Cause:
    if audio is not None and audio.swapped_channels:
        return Cause("channels", "the channels of b are swapped", "b is closer to a when they change places")
    if audio is not None and audio.aligned_snr_db is not None and audio.lag is not None and audio.gain is not None:
        better = audio.aligned_snr_db - (audio.snr_db or 0.0)
        if better > 20 and audio.lag:
            text = f"b is {abs(audio.lag)} samples {'late' if audio.lag > 0 else 'early'}"
            return Cause("lag", text, f"SNR {audio.snr_db:.1f} dB, aligned {audio.aligned_snr_db:.1f} dB")
        if better > 20:
            text = f"the level is off: b has to be multiplied by {audio.gain:.4g}"
            return Cause("gain", text, f"SNR {audio.snr_db:.1f} dB, aligned {audio.aligned_snr_db:.1f} dB")
    return _by_level(stage, "the codec's decoder differs: its weights, or the rings of its attention")
