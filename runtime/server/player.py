"""The page at `/`: type a text, choose or upload a voice, hear the stream, see the time to the first audio and the RTF.

It uses the public API like any client: raw PCM from /v1/audio/speech, played piece by piece with the Web Audio API.
"""

from __future__ import annotations

from html import escape

from runtime.manifest import Manifest
from runtime.page import page, paragraph, verdict
from runtime.server.settings import ServerSettings
from runtime.server.sfx_speaker import SoundSpeaker

_FORM = """
<p {choice}><label>Model <select id="model">{models}</select></label></p>
<p><label for="text">Text</label><br>
<textarea id="text" rows="4" style="width:100%" maxlength="{max_characters}">Hello! This is a test.</textarea></p>
<p><label>Voice <select id="voice"><option value="">the clip below</option></select></label>
<label>or a clip <input type="file" id="clip" accept="audio/*"></label></p>
<p><label>Seed <input type="number" id="seed" value="{seed}" style="width:8rem"></label>
<label id="keys" {keys}>API key <input type="password" id="key" autocomplete="off"></label>
<button id="speak">Speak</button> <button id="stop" disabled>Stop</button></p>
<p id="state" role="status">Ready.</p>
<table><tr><th>Time to first audio</th><th>Audio</th><th>RTF</th></tr>
<tr><td id="ttfa">–</td><td id="seconds">–</td><td id="rtf">–</td></tr></table>
<audio id="whole" controls hidden></audio>
"""

_SCRIPT = r"""
const $ = id => document.getElementById(id);
let RATE = 0;
let abort = null;
const headers = () => $("key").value ? {"Authorization": "Bearer " + $("key").value} : {};

async function listVoices() {
  const answer = await fetch("/v1/audio/voices", {headers: headers()});
  if (!answer.ok) return;
  const chosen = $("voice").value;
  $("voice").length = 1;
  for (const voice of (await answer.json()).uploaded_voices) $("voice").add(new Option(voice.name, voice.name));
  $("voice").value = chosen;
}

const dataUrl = file => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve("data:audio/x;base64," + reader.result.split(",")[1]);
  reader.onerror = () => reject(new Error("the clip cannot be read"));
  reader.readAsDataURL(file);
});

function wavBlob(parts, bytes) {
  const head = new DataView(new ArrayBuffer(44));
  const text = (at, s) => [...s].forEach((c, i) => head.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF"); head.setUint32(4, 36 + bytes, true); text(8, "WAVEfmt "); head.setUint32(16, 16, true);
  head.setUint16(20, 1, true); head.setUint16(22, 1, true); head.setUint32(24, RATE, true);
  head.setUint32(28, 2 * RATE, true); head.setUint16(32, 2, true); head.setUint16(34, 16, true);
  text(36, "data"); head.setUint32(40, bytes, true);
  return new Blob([head, ...parts], {type: "audio/wav"});
}

async function speak() {
  const body = {input: $("text").value, stream_format: "audio", response_format: "pcm", seed: Number($("seed").value)};
  const model = $("model").selectedOptions[0];
  body.model = model.value; RATE = Number(model.dataset.rate);
  if (!model.dataset.voices) body.voice = "default";
  else if ($("clip").files.length) body.ref_audio = await dataUrl($("clip").files[0]);
  else body.voice = $("voice").value;
  abort = new AbortController();
  const context = new AudioContext({sampleRate: RATE});
  const began = performance.now();
  let first = null, playAt = 0, bytes = 0, odd = new Uint8Array(0);
  const parts = [];
  try {
    const answer = await fetch("/v1/audio/speech", {method: "POST", signal: abort.signal, body: JSON.stringify(body),
      headers: {"Content-Type": "application/json", ...headers()}});
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.getReader();
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      if (first === null) { first = performance.now(); $("ttfa").textContent = (first - began).toFixed(0) + " ms"; }
      const data = new Uint8Array(odd.length + value.length);
      data.set(odd); data.set(value, odd.length);
      const whole = data.length & ~1;
      odd = data.slice(whole);
      if (!whole) continue;
      const piece = data.slice(0, whole), samples = new Int16Array(piece.buffer);
      parts.push(piece); bytes += whole;
      const buffer = context.createBuffer(1, samples.length, RATE), channel = buffer.getChannelData(0);
      for (let i = 0; i < samples.length; i++) channel[i] = samples[i] / 32768;
      const source = context.createBufferSource();
      source.buffer = buffer; source.connect(context.destination);
      playAt = Math.max(playAt, context.currentTime + 0.02);
      source.start(playAt);
      playAt += buffer.duration;
      $("seconds").textContent = (bytes / 2 / RATE).toFixed(2) + " s";
    }
    const seconds = bytes / 2 / RATE;
    $("rtf").textContent = ((performance.now() - began) / 1000 / seconds).toFixed(3);
    if ($("whole").src) URL.revokeObjectURL($("whole").src);
    $("whole").src = URL.createObjectURL(wavBlob(parts, bytes)); $("whole").hidden = false;
    $("state").textContent = "Done.";
  } catch (error) {
    context.close();
    $("state").textContent = error.name === "AbortError" ? "Stopped." : "Failed: " + error.message;
  }
}

$("speak").onclick = async () => {
  $("speak").disabled = true; $("stop").disabled = false; $("state").textContent = "Speaking …";
  for (const id of ["ttfa", "seconds", "rtf"]) $(id).textContent = "–";
  try { await speak(); } catch (error) { $("state").textContent = "Failed: " + error.message; }
  $("speak").disabled = false; $("stop").disabled = true;
};
$("stop").onclick = () => abort && abort.abort();
$("key").onchange = listVoices;
listVoices();
"""


def player_page(manifest: Manifest, settings: ServerSettings, sounds: SoundSpeaker | None = None) -> str:
    """The page of one server; with a choice of the model when it serves two."""
    models = _option(settings.model_names[0], manifest.codec.sample_rate_hz, "yes")
    if sounds is not None:
        models += _option(sounds.model_names[0], sounds.sample_rate_hz, "")
    form = _FORM.format(
        models=models, choice="" if sounds else "hidden",
        max_characters=settings.max_characters, seed=settings.default_seed, keys="" if settings.api_keys else "hidden",
    )  # fmt: skip
    notice = [verdict("warn", manifest.notice)] if manifest.notice else []
    intro = paragraph("The RTF here is the time until the last byte arrived, over the seconds of audio.")
    return page("MOSS-TTS-Nano", *notice, form, intro, f"<script>{_SCRIPT}</script>")


def _option(name: str, rate_hz: int, voices: str) -> str:
    return f'<option value="{escape(name)}" data-rate="{rate_hz}" data-voices="{voices}">{escape(name)}</option>'
