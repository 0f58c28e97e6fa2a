"""Made-up weights of the language model that speak for a few seconds and stop, with clear margins between codes.

How it works. Code c of channel i is embedded as a vector B[p] on a ring of V places, p = a permutation of c that
differs per channel. B is made of cosines and sines, so "go on by d places" is one rotation R^d, the same for all p:

    global blocks    each attention and each MLP turns its own row by some places: without one of them, or with heads
                     that look elsewhere (RoPE, mask, positions), the sum of the turns is another and so are the codes
    block 1          half of the heads look one row back, RoPE tells them where: two chains of codes, one in the even
                     and one in the odd frames, go on by one place each time. The other half, on the [audio_start] row,
                     look at the last but one text token; its embedding names two starts of the even chain
    block 2          a head on the [audio_start] row reads, from the [audio_end] row behind the reference, whether the
                     last reference code of channel 0 stands on an even place: it decides between the two starts
    local blocks     channel 0 follows the global state, channel 1 channel 0, every later one the channel two before
    end token        its embedding is where the even chain arrives after 14 to 28 steps, that is 28 to 56 frames

All of it lies in a random orthogonal basis, under random norms, biases and noise: no weight is a plain zero or one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from convert.fixture_heads import Heads, global_heads, local_heads, rope_angles
from convert.fixture_space import NOISE, PARITY_SHARE, Array, Ints, Space, normalise
from runtime.config import ModelConfig

MIN_STEPS, MAX_STEPS = 14, 28  # of the even chain; each takes two frames
SLOT_SIZE = 2.5  # what says "a frame follows" on slot rows; half as much again on [audio_start]
CODE_SIZES = (1.0, 0.2)  # embedding of channel 0, which keeps time, and of the others
START_SIZES = (0.75, 0.68)  # the two starts that a text token names; without a voice the first wins
ODD_START = 3  # places behind the end where the odd chain begins
BEST_LOGIT = 4.2  # of channels 1 and later, on average: sampling finds others, greedy does not
END_OVER_SLOT = 1.8  # score of the end token where it belongs, in scores of the slot token
MLP_BIAS = 0.2
REFERENCE_FRAMES, CALIBRATION_FRAMES = 8, 224


class ModelDesigner:
    """Puts the weights together, block by block; each block is calibrated on rows that ran through those before it."""

    def __init__(self, config: ModelConfig, text_distance: int, seed: int) -> None:
        """`text_distance`: rows from [audio_start] back to the last but one text token."""
        self.config, self.text_distance = config, text_distance
        self.rng = np.random.default_rng(seed)
        self.space = Space(config, self.rng)
        V = config.codebook_size
        self.places = [self.rng.permutation(V) for _ in range(config.n_vq)]  # code -> place, per channel
        self.end_place = int(self.rng.integers(V))
        self.turns = self._turns()  # sets local_back and local_turn
        self.weights: dict[str, Array] = {}

    def build(self) -> dict[str, Array]:
        """All weights by their published names, tied heads left out."""
        config, turns = self.config, self.turns
        back = 1 - int(turns.sum()) - self.local_back  # so that all turns together are one place
        self._embeddings()
        x = self._embed(self._calibration_rows())
        for layer in range(config.num_layers):
            attention, mlp = (int(t) for t in turns[layer])
            heads = global_heads(
                self.space, layer, x[0], attention, back, self.text_distance, self.start_row, self.end_row
            )
            x = self._block(f"transformer.h.{layer}", x, heads, mlp, slice(self.start_row + 1, None))
        hidden = self._final_norm("transformer.ln_f", x, 2.0 / np.sqrt(config.hidden_size))
        x = self._local_inputs(hidden)
        for layer in range(config.local_layers):
            attention, mlp = (int(t) for t in turns[config.num_layers + layer])
            heads = local_heads(self.space, layer, x, attention, self.local_back)
            x = self._block(f"local_transformer.h.{layer}", x, heads, mlp, slice(1, None))
        states = self._final_norm("local_transformer.ln_f", x, 1.0)
        best = np.mean([(states[:, 1 + i] @ self.weights[f"audio_embeddings.{i}.weight"].T).max(-1).mean()
                        for i in range(1, config.n_vq)])  # fmt: skip
        for part in ("weight", "bias"):
            self.weights[f"local_transformer.ln_f.{part}"] *= BEST_LOGIT / best
        self._fit_end(states[:, 0] * BEST_LOGIT / best)
        return self.weights

    def _turns(self) -> Ints:
        """Places by which the attention and the MLP of each block turn; the channels of a frame stand apart."""
        config, V = self.config, self.config.codebook_size
        while True:
            turns = self.rng.integers(1, V, (config.num_layers + config.local_layers, 2))
            turns[1, 0] = turns[config.num_layers, 0] = 0
            self.local_back, self.local_turn = int(self.rng.integers(1, V)), int(turns[config.num_layers :].sum())
            if len(set(self._channel_places(np.zeros(1, np.int64))[0])) == config.n_vq:
                return turns

    def _channel_places(self, places: npt.NDArray[np.integer]) -> Ints:
        """The places [frames, n_vq] of all channels when channel 0 stands on `places`."""
        columns = [places, places + self.local_turn]
        for _ in range(2, self.config.n_vq):
            columns.append(columns[-2] + self.local_turn + self.local_back)
        return np.stack(columns[: self.config.n_vq], 1) % self.config.codebook_size

    # Embeddings

    def _embeddings(self) -> None:
        config, space, rng, flags = self.config, self.space, self.rng, self.space.flags
        for i, size in enumerate(config.codebook_sizes):
            scale, parity = (CODE_SIZES[0], PARITY_SHARE) if i == 0 else (CODE_SIZES[1], 0.0)
            codes = scale * space.at(self.places[i][:size], parity) + space.free_noise(size, NOISE)
            self.weights[f"audio_embeddings.{i}.weight"] = codes
        steps = rng.integers(MIN_STEPS, MAX_STEPS, config.vocab_size)
        swap = rng.integers(0, 2, config.vocab_size)
        wte = np.zeros((config.vocab_size, config.hidden_size))
        for start_size, other in zip(START_SIZES, (swap, 1 - swap), strict=True):
            wte += start_size * space.at(self.end_place - 1 - steps - other, PARITY_SHARE)
        row_size = math.sqrt(SLOT_SIZE**2 + CODE_SIZES[0] ** 2 + (config.n_vq - 1) * CODE_SIZES[1] ** 2)
        wte += space.free_noise(len(wte), math.sqrt(row_size**2 - sum(s**2 for s in START_SIZES)))
        odd_start = 1.6 * space.at(self.end_place + ODD_START, PARITY_SHARE)
        special: dict[int, Array] = {
            config.pad_id: np.zeros(config.hidden_size),
            config.im_end_id: np.zeros(config.hidden_size),
            config.audio_user_slot_id: np.zeros(config.hidden_size),
            config.audio_assistant_slot_id: SLOT_SIZE * flags["slot"],
            config.im_start_id: flags["im_start"],
            config.audio_end_id: flags["audio_end"],
            config.audio_start_id: flags["audio_start"] + 1.5 * SLOT_SIZE * flags["slot"] + odd_start,
        }
        for token, vector in special.items():
            rest = row_size**2 - float(vector @ vector)  # equal rows, so that LayerNorm makes none of them louder
            wte[token] = vector + space.free_noise(1, math.sqrt(max(rest, 0.1)))[0]
        self.weights["transformer.wte.weight"] = wte

    def _fit_end(self, states: Array) -> None:
        """Give the end token the ring vector that the local state of position 0 matches at the end and nowhere else."""
        wte = self.weights["transformer.wte.weight"]
        slot = states @ wte[self.config.audio_assistant_slot_id]
        ring = states @ self.space.onto_ring[:, :-2]  # without parity: the voice may not decide about the end
        is_end = self.next_places % self.config.codebook_size == self.end_place
        wanted = np.where(is_end, END_OVER_SLOT * slot, 0.0) - states @ wte[self.config.audio_end_id]
        penalty = 1e-2 * np.trace(ring.T @ ring) / ring.shape[1] * np.eye(ring.shape[1])
        fitted = np.linalg.solve(ring.T @ ring + penalty, ring.T @ wanted)
        wte[self.config.audio_end_id] += self.space.onto_ring[:, :-2] @ fitted

    # Rows to calibrate on: a prompt with a reference, then two chains of frames

    def _calibration_rows(self) -> Ints:
        config, rng = self.config, self.rng
        special = (config.pad_id, config.im_start_id, config.im_end_id, config.audio_start_id, config.audio_end_id,
                   config.audio_user_slot_id, config.audio_assistant_slot_id)  # fmt: skip
        words = np.setdiff1d(np.arange(config.vocab_size), special)
        before = [config.im_start_id, *rng.choice(words, 20), config.audio_start_id]
        after = [*rng.choice(words, 40), config.im_end_id, config.im_start_id, *rng.choice(words, 3)]
        self.end_row = len(before) + REFERENCE_FRAMES
        self.start_row = self.end_row + 1 + len(after)
        text = [*before, *[config.audio_user_slot_id] * REFERENCE_FRAMES, config.audio_end_id, *after]
        text += [config.audio_start_id, *[config.audio_assistant_slot_id] * CALIBRATION_FRAMES]
        rows = np.full((len(text), 1 + config.n_vq), config.audio_pad_id)
        rows[:, 0] = text
        audio = np.array([*range(len(before), self.end_row), *range(self.start_row + 1, len(text))])
        turns_round = -(-len(audio) // config.codebook_size)
        places = np.concatenate([rng.permutation(config.codebook_size) for _ in range(turns_round)])[: len(audio)]
        places[REFERENCE_FRAMES + 2 :: 4] = self.end_place - 1  # so that every fourth frame is an end
        rows[audio, 1:] = self._frames(places)
        for channel in range(1, config.n_vq):  # as sampling does
            others = audio[rng.random(len(audio)) < 0.4]
            rows[others, 1 + channel] = rng.integers(config.codebook_sizes[channel], size=len(others))
        self.next_places = 1 + np.array([self.end_place + ODD_START, *places[REFERENCE_FRAMES:-1]])
        return rows

    def _frames(self, places: npt.NDArray[np.integer]) -> Ints:
        """Codes [frames, n_vq] whose channel 0 stands on `places` and whose other channels follow from it."""
        at = self._channel_places(places)
        return np.stack([np.argsort(places_of)[at[:, i]] for i, places_of in enumerate(self.places)], 1)

    def _embed(self, rows: Ints) -> Array:
        x = self.weights["transformer.wte.weight"][rows[:, 0]]
        for i in range(self.config.n_vq):
            table = np.vstack([self.weights[f"audio_embeddings.{i}.weight"], np.zeros(self.config.hidden_size)])
            x = x + table[np.minimum(rows[:, 1 + i], len(table) - 1)]
        return np.asarray(x[None])

    def _local_inputs(self, hidden: Array) -> Array:
        """[frames, 1 + n_vq, E]: the global state, the slot token, the codes of the chain that follows from it."""
        frames = hidden[0, self.start_row + 1 :]
        slot = self.weights["transformer.wte.weight"][self.config.audio_assistant_slot_id]
        next_codes = self._frames(self.next_places)
        codes = [self.weights[f"audio_embeddings.{i}.weight"][next_codes[:, i]] for i in range(self.config.n_vq - 1)]
        return np.stack([frames, np.broadcast_to(slot, frames.shape), *codes], 1)

    # Blocks

    def _block(self, name: str, x: Array, heads: Heads, turn: int, typical: slice) -> Array:
        """Write one block and run the calibration rows through it; the rows `typical` set the scale."""
        E = self.config.hidden_size
        normal, _ = normalise(x, self.config.layer_norm_eps)
        qkv = np.concatenate([p.reshape(E, E) for p in (heads.q, heads.k, heads.v)])
        bias = np.concatenate([b.reshape(-1) for b in (heads.q_bias, heads.k_bias, heads.v_bias)])
        self._linear(f"{name}.ln_1", f"{name}.attn.c_attn", qkv, bias)
        out, out_bias = heads.o.transpose(1, 0, 2).reshape(E, E), self.space.noise(E)
        self.weights |= {f"{name}.attn.c_proj.weight": out, f"{name}.attn.c_proj.bias": out_bias}
        q, k, v = np.split(normal @ qkv.T + bias, 3, -1)
        x = x + self._attend(q, k, v) @ out.T + out_bias
        return x + self._mlp(name, x, turn, typical)

    def _attend(self, q: Array, k: Array, v: Array) -> Array:
        N, T, E = q.shape
        H, D = self.config.num_heads, self.config.head_size
        q, k, v = (p.reshape(N, T, H, D).transpose(0, 2, 1, 3) for p in (q, k, v))
        angles = np.arange(T)[:, None] * rope_angles(self.space)
        turn = np.exp(1j * angles)
        q, k = ((p[..., 0::2] + 1j * p[..., 1::2]) * turn for p in (q, k))
        scores = (q @ k.conj().swapaxes(-1, -2)).real / np.sqrt(D)
        scores = np.where(np.triu(np.ones((T, T), bool), 1), -np.inf, scores)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = powers / powers.sum(-1, keepdims=True) @ v
        return np.asarray(mixed.transpose(0, 2, 1, 3).reshape(N, T, E))

    def _mlp(self, name: str, x: Array, turn: int, typical: slice) -> Array:
        """gelu(u + b) - gelu(-u + b) is nearly proportional to u: pairs of units turn the ring; the rest is noise."""
        E, inner, size = self.config.hidden_size, self.config.inner_size, self.space.ring.size
        normal, scale = normalise(x, self.config.layer_norm_eps)
        sigma = float(scale[:, typical].mean())
        mix = np.linalg.qr(self.rng.standard_normal((size, size)))[0]
        fc_in = self.rng.standard_normal((inner, E)) / np.sqrt(E)
        fc_in[:size], fc_in[size : 2 * size] = mix @ self.space.onto_ring.T, -mix @ self.space.onto_ring.T
        bias = self.space.noise(inner)
        bias[: 2 * size] += MLP_BIAS
        fc_out = self.space.noise(E, inner) / np.sqrt(inner) * 2 * sigma
        units = _gelu(normal @ fc_in.T + bias)
        wanted = normal @ fc_in[:size].T
        pairs = units[..., :size] - units[..., size : 2 * size]
        slope = float((pairs * wanted).sum() / (wanted**2).sum())
        write = sigma / slope * self.space.onto_ring @ self.space.turn(turn, keep=1) @ mix.T
        fc_out[:, :size], fc_out[:, size : 2 * size] = write, -write
        self._linear(f"{name}.ln_2", f"{name}.mlp.fc_in", fc_in, bias)
        out_bias = self.space.noise(E) * sigma
        self.weights |= {f"{name}.mlp.fc_out.weight": fc_out, f"{name}.mlp.fc_out.bias": out_bias}
        return np.asarray(units @ fc_out.T + out_bias)

    def _linear(self, norm: str, name: str, weight: Array, bias: Array) -> None:
        """Store what acts on the normalised row as random LayerNorm weights and the linear layer that undoes them."""
        gain = 1 + 0.1 * self.rng.standard_normal(weight.shape[1:])
        shift = 0.05 * self.rng.standard_normal(weight.shape[1:])
        stored = weight / gain
        self.weights |= {f"{norm}.weight": gain, f"{norm}.bias": shift}
        self.weights |= {f"{name}.weight": stored, f"{name}.bias": bias - stored @ shift}

    def _final_norm(self, name: str, x: Array, scale: float) -> Array:
        gain = scale * (1 + 0.02 * self.rng.standard_normal(x.shape[-1:]))
        shift = scale * self.space.noise(x.shape[-1])
        self.weights |= {f"{name}.weight": gain, f"{name}.bias": shift}
        return np.asarray(normalise(x, self.config.layer_norm_eps)[0] * gain + shift)


def _gelu(u: Array) -> Array:
    return np.asarray(0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))))
