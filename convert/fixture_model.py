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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.config import ModelConfig

Array = npt.NDArray[np.float64]

MIN_STEPS, MAX_STEPS = 14, 28  # of the even chain; each takes two frames
SLOT_SIZE = 2.0  # what says "a frame follows" on slot rows
CODE_SIZES = (1.0, 0.2)  # embedding of channel 0, which keeps time, and of the others
PARITY_SHARE = 0.3  # coordinate of B[p] that is + on even and - on odd places; channel 0 and starts alone
START_SIZES = (0.75, 0.68)  # the two starts that a text token names; without a voice the first wins
FLAG_SIZE = 1.0
BACK_GAIN, TEXT_GAIN = 4.0, 5.0  # of the heads that look one row back, and at the text
VOICE_SIZE = 2.5  # length of what the voice adds: to even places, or to odd ones
LOCAL_BACK_GAIN, LOCAL_SELF_GAIN = 3.0, 0.9  # lengths of what they write, a row of codes being 0.2 to 1
BEST_LOGIT = 6.0  # of channels 1 and later, on average
LOOK, CONTENT_LOOK = 12.0, 14.0  # by how much a score that is meant beats the others
NOISE = 0.01
MLP_BIAS = 0.2
CALIBRATION_FRAMES = 160


@dataclass(frozen=True, slots=True)
class Ring:
    """Places on a ring as vectors: pairs of cosine and sine, then the parity coordinate, then one that stays empty."""

    places: int
    frequencies: npt.NDArray[np.int64]

    @property
    def size(self) -> int:
        return 2 * len(self.frequencies) + 2

    def vector(self, place: npt.ArrayLike, parity: float) -> Array:
        """B[p], of length 1."""
        p = np.asarray(place)[..., None]
        angle = 2 * np.pi * self.frequencies * p / self.places
        waves = np.stack([np.cos(angle), np.sin(angle)], -1).reshape(*p.shape[:-1], -1)
        even = parity * (1.0 - 2.0 * (p % 2))
        return np.concatenate([waves * np.sqrt((1 - parity**2) / len(self.frequencies)), even, 0 * even], -1)

    def turn(self, places: int) -> Array:
        """R^d with R^d B[p] = B[p + d]."""
        matrix = np.eye(self.size)
        for j, angle in enumerate(2 * np.pi * self.frequencies * places / self.places):
            cos, sin = np.cos(angle), np.sin(angle)
            matrix[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = [[cos, -sin], [sin, cos]]
        matrix[-2, -2] = (-1.0) ** places
        return matrix


@dataclass(slots=True)
class Attention:
    """The heads of one block: what they read of a normalised row (q, k, v), their biases, what they write (o)."""

    q: Array  # [H, D, E]
    k: Array
    v: Array
    o: Array  # [H, E, D]
    q_bias: Array  # [H, D]
    k_bias: Array
    v_bias: Array


class ModelDesigner:
    """Puts the weights together, block by block; each block is calibrated on rows that ran through those before it."""

    def __init__(self, config: ModelConfig, text_distance: int, seed: int) -> None:
        """`text_distance`: rows from [audio_start] back to the last but one text token."""
        self.config, self.text_distance = config, text_distance
        self.rng = np.random.default_rng(seed)
        E, V = config.hidden_size, config.codebook_size
        square = self.rng.standard_normal((E, E))
        square[:, 0] = 1  # LayerNorm removes the mean: nothing may live there
        self.basis = np.linalg.qr(square)[0]
        number = min(config.num_heads // 2 * config.head_size // 2 - 1, (V - 1) // 2)
        self.ring = Ring(V, np.sort(self.rng.permutation(np.arange(1, (V + 1) // 2))[:number]))
        self.places = [self.rng.permutation(V) for _ in range(config.n_vq)]  # code -> place, per channel
        names = ("slot", "im_start", "audio_start", "audio_end")
        first = 1 + self.ring.size
        self.flags = {name: self.basis[:, first + i] for i, name in enumerate(names)}
        self.free = self.basis[:, first + len(names) :]
        self.onto_ring = self.basis[:, 1 : 1 + self.ring.size]  # [E, ring]
        self.weights: dict[str, Array] = {}

    def build(self) -> dict[str, Array]:
        """All weights by their published names, tied heads left out."""
        config = self.config
        turns = self._turns()
        back = 1 - int(turns.sum()) - self.local_back  # so that all turns together are one place
        self.end_place = int(self.rng.integers(self.ring.places))
        self._embeddings()
        x = self._embed(self._calibration_rows())
        for layer in range(config.num_layers):
            look = self._global_attention(layer, x, int(turns[layer, 0]), back)
            x = self._block(f"transformer.h.{layer}", x, look, int(turns[layer, 1]))
        hidden = self._final_norm("transformer.ln_f", x, 2.0 / np.sqrt(config.hidden_size))
        x = self._local_inputs(hidden)
        for layer in range(config.local_layers):
            attention = self._local_attention(layer, x, int(turns[config.num_layers + layer, 0]))
            x = self._block(
                f"local_transformer.h.{layer}", x, attention, int(turns[config.num_layers + layer, 1]), local=True
            )
        states = self._final_norm("local_transformer.ln_f", x, 1.0)
        best = [(states[:, 2 + i] @ self.weights[f"audio_embeddings.{1 + i}.weight"].T).max(-1).mean()
                for i in range(config.n_vq - 1)]  # fmt: skip
        self.weights["local_transformer.ln_f.weight"] *= BEST_LOGIT / np.mean(best)
        self._fit_end(states[:, 0] * BEST_LOGIT / np.mean(best))
        return self.weights

    def _turns(self) -> npt.NDArray[np.int64]:
        """Places by which the attention and the MLP of each block turn; the channels of a frame stand apart."""
        config, V = self.config, self.ring.places
        while True:
            turns = self.rng.integers(1, V, (config.num_layers + config.local_layers, 2))
            turns[1, 0] = turns[config.num_layers, 0] = 0
            self.local_back, self.local_turn = int(self.rng.integers(1, V)), int(turns[config.num_layers :].sum())
            if len(set(self._channel_places(np.zeros(1, np.int64))[0])) == config.n_vq:
                return turns

    def _channel_places(self, places: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """The places [frames, n_vq] of all channels when channel 0 stands on `places`."""
        columns = [places, places + self.local_turn]
        for _ in range(2, self.config.n_vq):
            columns.append(columns[-2] + self.local_turn + self.local_back)
        return np.stack(columns[: self.config.n_vq], 1) % self.ring.places

    # Embeddings

    def _embeddings(self) -> None:
        config, ring, rng = self.config, self.ring, self.rng
        for i, size in enumerate(config.codebook_sizes):
            scale, parity = (CODE_SIZES[0], PARITY_SHARE) if i == 0 else (CODE_SIZES[1], 0.0)
            places = scale * ring.vector(self.places[i][:size], parity) @ self.onto_ring.T
            self.weights[f"audio_embeddings.{i}.weight"] = places + self._free_noise(size, NOISE)
        steps = rng.integers(MIN_STEPS, MAX_STEPS, config.vocab_size)
        swap = rng.integers(0, 2, config.vocab_size)
        wte = np.zeros((config.vocab_size, config.hidden_size))
        for size, other in zip(START_SIZES, (swap, 1 - swap), strict=True):
            wte += size * ring.vector(self.end_place - 1 - steps - other, PARITY_SHARE) @ self.onto_ring.T
        row_size = np.sqrt(SLOT_SIZE**2 + CODE_SIZES[0] ** 2 + (config.n_vq - 1) * CODE_SIZES[1] ** 2)
        wte += self._free_noise(len(wte), np.sqrt(row_size**2 - sum(s**2 for s in START_SIZES)))
        special = {
            config.pad_id: 0.0,
            config.im_end_id: 0.0,
            config.audio_user_slot_id: 0.0,
            config.audio_assistant_slot_id: SLOT_SIZE * self.flags["slot"],
            config.im_start_id: FLAG_SIZE * self.flags["im_start"],
            config.audio_end_id: FLAG_SIZE * self.flags["audio_end"],
            config.audio_start_id: FLAG_SIZE * self.flags["audio_start"] + 1.5 * SLOT_SIZE * self.flags["slot"]
            + 1.3 * ring.vector(self.end_place + 3, PARITY_SHARE) @ self.onto_ring.T,
        }  # fmt: skip
        for token, vector in special.items():
            rest = row_size**2 - np.sum(np.square(vector))  # equal rows, so that LayerNorm makes none of them louder
            wte[token] = vector + self._free_noise(1, np.sqrt(max(rest, 0.1)))[0]
        self.weights["transformer.wte.weight"] = wte

    def _fit_end(self, states: Array) -> None:
        """Give the end token the ring vector that the local state of position 0 matches at the end and nowhere else."""
        wte = self.weights["transformer.wte.weight"]
        slot = states @ wte[self.config.audio_assistant_slot_id]
        ring = states @ self.onto_ring[:, :-2]  # without parity: the voice may not decide about the end
        is_end = self.next_places % self.ring.places == self.end_place
        wanted = np.where(is_end, 1.65 * slot, 0.0) - states @ wte[self.config.audio_end_id]
        penalty = 1e-2 * np.trace(ring.T @ ring) / ring.shape[1] * np.eye(ring.shape[1])
        wte[self.config.audio_end_id] += self.onto_ring[:, :-2] @ np.linalg.solve(
            ring.T @ ring + penalty, ring.T @ wanted
        )

    def _free_noise(self, count: int, size: float) -> Array:
        noise = self.rng.standard_normal((count, self.free.shape[1]))
        return np.asarray(size * noise / np.linalg.norm(noise, axis=1, keepdims=True) @ self.free.T)

    # Rows to calibrate on: a prompt with a reference, then two chains of frames

    def _calibration_rows(self) -> npt.NDArray[np.int64]:
        config, rng = self.config, self.rng
        special = (config.pad_id, config.im_start_id, config.im_end_id, config.audio_start_id, config.audio_end_id,
                   config.audio_user_slot_id, config.audio_assistant_slot_id)  # fmt: skip
        words = np.setdiff1d(np.arange(config.vocab_size), special)
        text = [config.im_start_id, *rng.choice(words, 20), config.audio_start_id]
        text += [config.audio_user_slot_id] * 8
        text += [
            config.audio_end_id,
            *rng.choice(words, 40),
            config.im_end_id,
            config.im_start_id,
            *rng.choice(words, 3),
        ]
        self.start_row = len(text)
        text += [config.audio_start_id] + [config.audio_assistant_slot_id] * CALIBRATION_FRAMES
        rows = np.full((len(text), 1 + config.n_vq), config.audio_pad_id)
        rows[:, 0] = text
        self.first_reference, self.end_row = 22, 30
        audio = np.array([*range(22, 30), *range(self.start_row + 1, len(text))])
        places = rng.integers(self.ring.places, size=len(audio))
        places[10::4] = self.end_place - 1  # so that every fourth frame is an end
        rows[audio, 1:] = self._frames(places)
        self.next_places = 1 + np.array([self.end_place + 3, *places[8:-1]])
        return rows

    def _frames(self, places: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Codes [frames, n_vq] whose channel 0 stands on `places` and whose other channels follow from it."""
        at = self._channel_places(places)
        return np.stack([np.argsort(places_of)[at[:, i]] for i, places_of in enumerate(self.places)], 1)

    def _embed(self, rows: npt.NDArray[np.int64]) -> Array:
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

    # Attention

    def _heads(self, scale: float) -> Attention:
        """Heads that look at random and write noise."""
        H, D, E = self.config.num_heads, self.config.head_size, self.config.hidden_size
        q, k, v = self.rng.standard_normal((3, H, D, E)) / np.sqrt(E)
        o = self.rng.standard_normal((H, E, D)) / np.sqrt(E) * NOISE * 2 * scale
        return Attention(q, k, v, o, *self.rng.standard_normal((3, H, D)) * NOISE)

    def _carry(self, heads: Attention, first: int, matrix: Array) -> None:
        """Let `size / D` heads from `first` on carry the ring part of the row they look at, multiplied by `matrix`."""
        D = self.config.head_size
        for n, start in enumerate(range(0, self.ring.size, D)):
            part = slice(start, start + D)
            width = self.onto_ring[:, part].shape[1]
            mix = np.linalg.qr(self.rng.standard_normal((D, D)))[0][:, :width]
            noise = self.rng.standard_normal((2, D, self.config.hidden_size)) * NOISE / np.sqrt(self.config.hidden_size)
            heads.v[first + n] = mix @ self.onto_ring[:, part].T + noise[0]
            heads.o[first + n] = self.onto_ring @ matrix[:, part] @ mix.T + noise[1].T * np.abs(matrix).max()
            heads.q[first + n] *= NOISE
            heads.k[first + n] *= NOISE

    def _look_back(self, heads: Attention, first: int, distance: int) -> None:
        """Let the ring heads from `first` on look `distance` rows back, whatever stands there: biases and RoPE do it."""
        for head in self._ring_heads(first):
            heads.q_bias[head] += self._position_query(distance)
            heads.k_bias[head] += self._position_key()

    def _ring_heads(self, first: int) -> range:
        return range(first, first - (-self.ring.size // self.config.head_size))

    def _position_size(self) -> float:
        """Pair amplitude so that the neighbours of the meant row stay LOOK below it."""
        D = self.config.head_size
        drop = (1 - np.cos(self._angles()[: D // 4])).sum()
        return float(np.sqrt(LOOK * np.sqrt(D) / drop))

    def _angles(self) -> Array:
        D = self.config.head_size
        return np.asarray(self.config.rope_base ** (-np.arange(0, D, 2) / D))

    def _position_query(self, distance: int) -> Array:
        """In the faster half of the RoPE pairs: the key turned back by `distance` rows."""
        D = self.config.head_size
        angle = self._angles()[: D // 4] * distance
        pairs = np.stack([np.cos(angle), -np.sin(angle)], -1).reshape(-1)
        return np.concatenate([pairs, np.zeros(D - len(pairs))]) * self._position_size()

    def _position_key(self) -> Array:
        return self._position_query(0)

    def _content(self, number: int = 0) -> Array:
        """Two directions for scores of content, in the slowest quarter of the RoPE pairs, which hardly turn."""
        D = self.config.head_size
        pairs = max(D // 8, 1)
        return (
            np.concatenate([np.zeros(D - 2 * pairs), np.tile([1.0 - number, float(number)], pairs)])
            / np.sqrt(pairs)
            * D**0.25
        )

    def _global_attention(self, layer: int, x: Array, turn: int, back: int) -> Attention:
        """Block 1: back and text; block 2: voice and turn; the others: turn."""
        normal, scale = self._normal(x)
        audio = slice(self.start_row + 1, None)
        sigma = float(scale[0, audio].mean())
        heads = self._heads(sigma)
        half = self.config.num_heads // 2
        seen = {name: normal[0] @ flag for name, flag in self.flags.items()}
        if layer == 1:
            self._carry(heads, 0, BACK_GAIN * sigma * self.ring.turn(back))
            self._carry(heads, half, TEXT_GAIN * sigma * self.ring.turn(back))
            nowhere = self._content() * CONTENT_LOOK  # at [im_start], which has no place on the ring
            at_back, at_text = self._position_query(1), self._position_query(self.text_distance)
            # [audio_start] looks at the text alone, every other row one back alone.
            for head in [*self._ring_heads(0), *self._ring_heads(half)]:
                heads.k_bias[head] += self._position_key()
                heads.k[head] += np.outer(self._content() / seen["im_start"][0], self.flags["im_start"])
                usual, start = (at_back, nowhere) if head in self._ring_heads(0) else (nowhere, at_text)
                heads.q_bias[head] += usual
                change = (start - usual) / seen["audio_start"][self.start_row]
                heads.q[head] += np.outer(change, self.flags["audio_start"])
            return heads
        self._carry(heads, 0, sigma * (self.ring.turn(turn) - np.eye(self.ring.size)))
        self._look_back(heads, 0, 0)
        if layer == 2:
            parity = self.onto_ring[:, -2]
            mix = self.rng.standard_normal(self.config.head_size)
            mix /= np.linalg.norm(mix)
            heard = BACK_GAIN * CODE_SIZES[0] * PARITY_SHARE / scale[0, self.end_row]  # about, and with either sign
            heads.v[half], heads.o[half] = np.outer(mix, parity), np.outer(parity, mix) * VOICE_SIZE / heard
            heads.v_bias[half] = -mix * float(normal[0, 0] @ parity)  # what looks at [im_start] gets nothing
            heads.q_bias[half] += self._content() * CONTENT_LOOK / 2
            heads.q[half] = np.outer(
                self._content(1) * CONTENT_LOOK / seen["audio_start"][self.start_row], self.flags["audio_start"]
            )
            heads.k[half] = np.outer(self._content() / seen["im_start"][0], self.flags["im_start"]) + np.outer(
                self._content(1) / seen["audio_end"][self.end_row], self.flags["audio_end"]
            )
        return heads

    def _local_attention(self, layer: int, x: Array, turn: int) -> Attention:
        """Block 0: the position before, turned, and itself, not turned; the others: turn."""
        _, scale = self._normal(x)
        sigma = float(scale[:, 2:].mean())
        heads = self._heads(sigma)
        if layer == 0:
            unit = 1 / np.sqrt(self.config.hidden_size)
            self._carry(heads, 0, LOCAL_BACK_GAIN * unit * self.ring.turn(self.local_back))
            self._look_back(heads, 0, 1)
            half = self.config.num_heads // 2
            self._carry(heads, half, LOCAL_SELF_GAIN * unit * np.eye(self.ring.size))
            self._look_back(heads, half, 0)
        else:
            self._carry(heads, 0, sigma * (self.ring.turn(turn) - np.eye(self.ring.size)))
            self._look_back(heads, 0, 0)
        return heads

    # Blocks

    def _normal(self, x: Array) -> tuple[Array, Array]:
        """x minus its mean over its deviation, and the deviation [..., rows]."""
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + self.config.layer_norm_eps)
        return centred / scale, scale[..., 0]

    def _block(self, name: str, x: Array, heads: Attention, turn: int, local: bool = False) -> Array:
        """Write one block and run the calibration rows through it."""
        H, D, E = self.config.num_heads, self.config.head_size, self.config.hidden_size
        normal, _ = self._normal(x)
        qkv = np.concatenate([p.reshape(E, E) for p in (heads.q, heads.k, heads.v)])
        bias = np.concatenate([b.reshape(-1) for b in (heads.q_bias, heads.k_bias, heads.v_bias)])
        self._linear(f"{name}.ln_1", f"{name}.attn.c_attn", qkv, bias)
        out, out_bias = heads.o.transpose(1, 0, 2).reshape(E, E), self._noise(E)
        self.weights |= {f"{name}.attn.c_proj.weight": out, f"{name}.attn.c_proj.bias": out_bias}
        q, k, v = np.split(normal @ qkv.T + bias, 3, -1)
        x = x + self._attend(q, k, v) @ out.T + out_bias
        return x + self._mlp(name, x, turn, local)

    def _attend(self, q: Array, k: Array, v: Array) -> Array:
        N, T, E = q.shape
        H, D = self.config.num_heads, self.config.head_size
        q, k, v = (p.reshape(N, T, H, D).transpose(0, 2, 1, 3) for p in (q, k, v))
        angles = np.arange(T)[:, None] * self._angles()
        turn = np.exp(1j * angles)
        q, k = ((p[..., 0::2] + 1j * p[..., 1::2]) * turn for p in (q, k))
        scores = (q @ k.conj().swapaxes(-1, -2)).real / np.sqrt(D)
        scores = np.where(np.triu(np.ones((T, T), bool), 1), -np.inf, scores)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = powers / powers.sum(-1, keepdims=True) @ v
        return np.asarray(mixed.transpose(0, 2, 1, 3).reshape(N, T, E))

    def _mlp(self, name: str, x: Array, turn: int, local: bool) -> Array:
        """gelu(u + b) - gelu(-u + b) is nearly proportional to u: pairs of units turn the ring; the rest is noise."""
        E, inner, size = self.config.hidden_size, self.config.inner_size, self.ring.size
        normal, scale = self._normal(x)
        sigma = float(scale[:, 1:].mean() if local else scale[0, self.start_row + 1 :].mean())
        mix = np.linalg.qr(self.rng.standard_normal((size, size)))[0]
        fc_in = self.rng.standard_normal((inner, E)) / np.sqrt(E)
        fc_in[:size], fc_in[size : 2 * size] = mix @ self.onto_ring.T, -mix @ self.onto_ring.T
        bias = self._noise(inner)
        bias[: 2 * size] += MLP_BIAS
        fc_out = self.rng.standard_normal((E, inner)) / np.sqrt(inner) * NOISE * 2 * sigma
        units = _gelu(normal @ fc_in.T + bias)
        wanted = normal @ fc_in[:size].T
        pairs = units[..., :size] - units[..., size : 2 * size]
        slope = float((pairs * wanted).sum() / (wanted**2).sum())
        write = sigma / slope * self.onto_ring @ (self.ring.turn(turn) - np.eye(size)) @ mix.T
        fc_out[:, :size], fc_out[:, size : 2 * size] = write, -write
        self._linear(f"{name}.ln_2", f"{name}.mlp.fc_in", fc_in, bias)
        out_bias = self._noise(E) * sigma
        self.weights |= {f"{name}.mlp.fc_out.weight": fc_out, f"{name}.mlp.fc_out.bias": out_bias}
        return np.asarray(units @ fc_out.T + out_bias)

    def _noise(self, size: int) -> Array:
        return self.rng.standard_normal(size) * NOISE

    def _linear(self, norm: str, name: str, weight: Array, bias: Array) -> None:
        """Store what acts on the normalised row as random LayerNorm weights and the linear layer that undoes them."""
        gain = 1 + 0.1 * self.rng.standard_normal(weight.shape[1])
        shift = 0.05 * self.rng.standard_normal(weight.shape[1])
        stored = weight / gain
        self.weights |= {f"{norm}.weight": gain, f"{norm}.bias": shift}
        self.weights |= {f"{name}.weight": stored, f"{name}.bias": bias - stored @ shift}

    def _final_norm(self, name: str, x: Array, scale: float) -> Array:
        gain = scale * (1 + 0.02 * self.rng.standard_normal(x.shape[-1]))
        shift = scale * self._noise(x.shape[-1])
        self.weights |= {f"{name}.weight": gain, f"{name}.bias": shift}
        return np.asarray(self._normal(x)[0] * gain + shift)


def _gelu(u: Array) -> Array:
    return np.asarray(0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))))
