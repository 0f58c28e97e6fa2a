"""One parity, three forms from the same data: an HTML page that needs nothing else, JSON, and Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime import page, plots
from runtime.compare_audio import FLOOR_DB, AudioMetrics, log_spectrogram
from runtime.manifest import MADE_UP_NOTICE, write_atomically
from runtime.parity import Parity
from runtime.parity_loss import Loss
from runtime.parity_record import Recording
from runtime.parity_verdict import Mode, Stage, Verdict

HTML_NAME, JSON_NAME, MARKDOWN_NAME = "parity.html", "parity.json", "parity.md"
LOSS_TITLE = "Loss of the reduced weights"
SPECTRUM_DB = 40.0  # range of the difference spectrogram
_KINDS = {Verdict.DIVERGENT: "bad", Verdict.ERROR: "bad", Verdict.NEAR_TIE: "warn", Verdict.NOT_MEASURED: "warn"}

STAGE_HEADERS = ("stage", "verdict", "largest |a − b|: would have passed", "allowed", "relative", "cosine",
                 "correlation", "top-1", "what was found")  # fmt: skip
MODE_HEADERS = ("run", "verdict", "frames a", "frames b", "equal codes", "agreement", "what was found")


def write_report(parity: Parity, directory: Path, a: Recording | None = None, b: Recording | None = None) -> Path:
    """Write all three files; the recordings add waveforms and spectrograms. Returns the HTML page."""
    write_atomically(directory / JSON_NAME, to_json(parity))
    write_atomically(directory / MARKDOWN_NAME, to_markdown(parity))
    write_atomically(directory / HTML_NAME, to_html(parity, a, b))
    return directory / HTML_NAME


def to_json(parity: Parity) -> str:
    """Strict JSON; infinities and NaN are strings."""
    return json.dumps(parity.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def headline(parity: Parity) -> str:
    """What was compared with what."""
    return f"{parity.a.backend} ({parity.a.artifacts}) against {parity.b.backend} ({parity.b.artifacts})"


def notices(parity: Parity) -> list[str]:
    """What a reader must not overlook."""
    found = []
    if parity.a.made_up or parity.b.made_up:
        found.append(f"Not a voice: {MADE_UP_NOTICE}.")
    if parity.a.simulated or parity.b.simulated:
        found.append("A side ran on the simulator, on the CPU: nothing here is a device result.")
    return [*found, *parity.notes]


# -- the tables, which all forms share


def stage_rows(parity: Parity) -> list[list[Any]]:
    return [_stage_row(stage) for stage in parity.stages]


def _stage_row(stage: Stage) -> list[Any]:
    m = stage.metrics
    numbers = [m.relative, m.cosine, m.correlation, m.top1] if m is not None else [None] * 4
    place = "" if stage.frame is None else f" [frame {stage.frame}"
    place += "" if not place else f", codebook {stage.codebook}]" if stage.codebook is not None else "]"
    largest = m.max_abs if m is not None else None
    return [stage.name, stage.verdict.value, largest, stage.allowed, *numbers, stage.text + place]


def mode_rows(parity: Parity) -> list[list[Any]]:
    return [_mode_row(mode) for mode in parity.modes]


def _mode_row(mode: Mode) -> list[Any]:
    share = "" if mode.agreement is None else f"{mode.agreement:.2%}"
    return [mode.name, mode.verdict.value, *mode.frames, f"{mode.same_codes} of {mode.compared}", share, mode.text]


def audio_rows(audio: AudioMetrics) -> list[list[str]]:
    """Figures of the waveforms; a value that does not exist here is said to be undefined."""
    decibel = {
        "SNR": audio.snr_db,
        "segmental SNR, 20 ms": audio.segmental_snr_db,
        "log-mel distance": audio.log_mel_db,
        "SNR after lag and gain": audio.aligned_snr_db,
    }
    rows = [[name, "undefined" if v is None else f"{v:.4g} dB"] for name, v in decibel.items()]
    rows.append(["lag of b", "undefined" if audio.lag is None else f"{audio.lag} samples"])
    rows.append(["gain of b", "undefined" if audio.gain is None else f"{audio.gain:.6g}"])
    for name, side in (("a", audio.a), ("b", audio.b)):
        level = "silence" if side.rms_dbfs is None else f"{side.rms_dbfs:.2f} dBFS"
        rows.append(
            [
                f"level of {name}",
                f"{level}, peak {side.peak:.3f}, {side.clipped} clipped, {side.not_finite} NaN or infinite, "
                f"{side.seconds:.2f} s",
            ]
        )
    return rows


def loss_rows(loss: Loss) -> list[list[Any]]:
    """What reduced weights cost, both sides fed the same codes."""
    return [
        ["verdict", loss.verdict.value],
        [f"most likely code equal, of {loss.distributions} distributions", f"{loss.top1:.2%}"],
        ["KL of b from a, mean, nats", loss.kl_mean],
        ["KL, 95th percentile", loss.kl_p95],
        ["frame or end: likelier decision equal", f"{loss.slot_top1:.2%}"],
        ["frame or end: KL, mean", loss.slot_kl_mean],
        ["cosine of the hidden state, mean", loss.hidden_cosine_mean],
        ["cosine of the hidden state, smallest", loss.hidden_cosine_min],
    ]


def identity_rows(parity: Parity) -> list[list[str]]:
    """Who ran what."""
    a, b = parity.a, parity.b
    rows = [
        ["backend", a.backend, b.backend],
        ["artifacts", a.directory, b.directory],
        ["weights", a.cpu_weights, b.cpu_weights],
        ["weights sha256", a.weights[:16], b.weights[:16]],
        ["tokenizer sha256", a.tokenizer[:16], b.tokenizer[:16]],
        ["prompt template", a.template, b.template],
        ["graph per frame", *("step_frame" if x.fused else "step, then frame" for x in (a, b))],
        ["rows that the cache holds", str(a.capacity), str(b.capacity)],
        *[[name, a.versions.get(name, "–"), b.versions.get(name, "–")] for name in {**a.versions, **b.versions}],
        *[[f"{g} sha256", a.graphs.get(g, "–")[:16], b.graphs.get(g, "–")[:16]] for g in {**a.graphs, **b.graphs}],
    ]
    return [[str(x) for x in row] for row in rows]


def _plain(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


# -- Markdown


def to_markdown(parity: Parity) -> str:
    """For a pull request or a ticket."""
    parts = [f"# Parity: {headline(parity)}", f"**{parity.verdict.value}**. {parity.text}"]
    parts += [f"> {line}" for line in notices(parity)]
    if parity.cause is not None:
        parts.append(f"Likely cause ({parity.cause.kind}): {parity.cause.text}. Evidence: {parity.cause.evidence}.")
    parts += ["## Stages", _markdown_table(STAGE_HEADERS, stage_rows(parity))]
    parts += ["## Runs", _markdown_table(MODE_HEADERS, mode_rows(parity))]
    parts.append(f"Error against position: {parity.growth.verdict.value}, {parity.growth.text}.")
    if parity.loss is not None:
        parts += [f"## {LOSS_TITLE}", _markdown_table(("figure", "value"), loss_rows(parity.loss))]
    if parity.audio is not None:
        parts += ["## Waveform", _markdown_table(("figure", "value"), audio_rows(parity.audio))]
    parts += ["## Sides", _markdown_table(("", "a", "b"), identity_rows(parity))]
    parts += ["## Again", f"```\n{parity.command}\n```"] if parity.command else []
    return "\n\n".join(parts) + "\n"


def _markdown_table(headers: tuple[str, ...], rows: list[list[Any]]) -> str:
    lines = [list(headers), ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(_plain(c).replace("|", "\\|") for c in line) + " |" for line in lines)


# -- HTML


def to_html(
    parity: Parity, a: Recording | None = None, b: Recording | None = None, title: str = "", top: Sequence[str] = ()
) -> str:
    """The page: verdict, stages, runs, where codes agree, error against position, sound, who ran it.

    `top` comes first, for pages whose conclusion is another one (run-om precision).
    """
    kind = "warn" if top else _KINDS.get(parity.verdict, "good")
    parts = [*top, page.verdict(kind, f"{parity.verdict.value}. {parity.text}")]
    parts += [page.verdict("warn", line) for line in notices(parity)]
    if parity.cause is not None:
        parts.append(page.paragraph(f"What speaks for that cause ({parity.cause.kind}): {parity.cause.evidence}."))
    source = parity.floor or parity.limits.source
    limits = (
        f"Tolerances: {source}. A different code is a tie when both margins are at most {parity.limits.tie_margin:g}."
    )
    rows = [["–" if cell is None else cell for cell in row] for row in stage_rows(parity)]
    plan = parity.plan
    asked = f"“{plan.text}”, voice {plan.voice_text}, seed {plan.seed}, at most {plan.frames} frames."
    parts += [
        page.section("Stages, from text to waveform", _scrolling(page.table(STAGE_HEADERS, rows)),
                     page.paragraph(limits)),
        page.section("Runs", page.table(MODE_HEADERS, mode_rows(parity)), page.paragraph(f"Spoken: {asked}")),
        page.section("Equal codes in the replay", *_agreement(parity)),
        page.section("Error against position", *_growth(parity)),
    ]  # fmt: skip
    if parity.loss is not None:
        parts.append(page.section(LOSS_TITLE, page.table(("figure", "value"), loss_rows(parity.loss))))
    if parity.audio is not None:
        parts.append(
            page.section("Waveform of the same codes", page.table(("figure", "value"), audio_rows(parity.audio)))
        )
    if a is not None and b is not None:
        parts.append(page.section("Waveforms and spectrograms", *_sound(a, b)))
    parts.append(page.section("Who ran what", _scrolling(page.table(("", "a", "b"), identity_rows(parity)))))
    if parity.command:
        parts.append(page.section("The same again", f"<pre>{escape(parity.command)}</pre>"))
    return page.page(title or f"Parity: {headline(parity)}", *parts)


def _scrolling(html: str) -> str:
    return f"<div class='wide'>{html}</div>"


def _agreement(parity: Parity) -> list[str]:
    if not parity.agreement:
        return [page.paragraph("The sides were not fed the same codes: not measured.")]
    grid = np.array(parity.agreement).T  # [codebook, frame]
    replay = parity.mode("replay")
    shares = ", ".join(f"{q}: {share:.1%}" for q, share in enumerate(replay.per_codebook))
    return [
        plots.image(plots.agreement_map(grid), "agreement, codebook over frame", 8 * len(grid)),
        page.paragraph(
            f"Codebook 0 on top, frame 0 to {grid.shape[1] - 1} from left to right; green is equal, red different. "
            "Within a frame, everything behind the first different code follows from it."
        ),
        page.paragraph(f"Equal per codebook: {shares}."),
    ]


def _growth(parity: Parity) -> list[str]:
    growth = parity.growth
    line = plots.Line("relative error of the hidden state", growth.per_frame)
    said = page.paragraph(f"{growth.verdict.value}: {growth.text}.")
    return [plots.line_plot([line], "frame", "relative error", log=True), said] if growth.per_frame else [said]


def _sound(a: Recording, b: Recording) -> list[str]:
    if a.waveform is None or b.waveform is None:
        return [page.paragraph("A side gave no waveform: not measured.")]
    rate, n = a.sample_rate_hz, min(a.waveform.shape[-1], b.waveform.shape[-1])
    first, second = a.waveform[0], b.waveform[0]
    with np.errstate(invalid="ignore"):
        gap = first[:n] - second[:n]
    peak = float(np.nanmax(np.abs(np.where(np.isfinite(gap), gap, 0)), initial=0.0))
    scale = 1 / peak if peak else 1.0
    shown = f"a − b, magnified {scale:.3g} times" if peak else "a − b: zero wherever both are numbers"
    spectra = [_spectrum(x, rate) for x in (first, second)]
    columns = min(s.shape[1] for s in spectra)
    difference = np.abs(spectra[0][:, :columns] - spectra[1][:, :columns])
    parts = []
    for label, samples, color in (
        ("a", first, "var(--a)"),
        ("b", second, "var(--b)"),
        (shown, gap * scale, "var(--bad)"),
    ):
        parts.append(page.paragraph(label))
        parts.append(page.waveform_plot(samples, len(samples) / rate, color))
    for label, spectrum in zip(("a", "b"), spectra, strict=True):
        parts.append(page.paragraph(f"{label}: log-mel spectrogram, {FLOOR_DB:.0f} to 0 dB"))
        parts.append(plots.image(plots.light_map(spectrum[::-1], FLOOR_DB, 0.0), f"spectrogram of {label}", 140))
    parts.append(page.paragraph(f"|a − b| of the spectrograms, 0 to {SPECTRUM_DB:.0f} dB"))
    parts.append(
        plots.image(plots.light_map(difference[::-1], 0.0, SPECTRUM_DB), "difference of the spectrograms", 140)
    )
    return parts


def _spectrum(samples: npt.NDArray[np.float32], rate: int) -> npt.NDArray[np.float64]:
    return log_spectrogram(samples, rate, max_columns=600)
