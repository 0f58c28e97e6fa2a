"""A small SentencePiece model of the published kind: BPE, byte fallback, nmt_nfkc, the same special ids 0 to 14."""

from __future__ import annotations

import io

NUM_PIECES = 512  # 15 special, 256 bytes, the rest learned; a config may declare more ids than there are pieces
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|vision_pad|>", "<|video_pad|>",
           "<|vision_start|>", "<|vision_end|>", "<|audio_pad|>", "<user_inst>", "</user_inst>")  # fmt: skip
# Own sentences, and the words of the prompt template.
CORPUS = """user assistant None Instruction Tokens Quality Sound Event Ambient Sound Language Text Reference(s)
- Reference(s): - Instruction: None - Tokens: None - Quality: None - Sound Event: None - Ambient Sound: None
The quick brown fox jumps over the lazy dog, and then it takes a short rest in the sun.
Hello world. This is a short text to be spoken. How are you today? I am fine, thank you!
We export the model, run it on another machine, and compare what both of them say, frame by frame.
The train leaves at ten past eight from platform three; please stand behind the yellow line.
When the weather is good, the children play in the garden until their mother calls them to dinner.
A good test fails when the thing it tests is broken, and says which part of it was wrong.
Please read the following numbers: one, two, three, four, five, six, seven, eight, nine, ten.
今天天气很好，我们一起去公园散步吧。你好，世界！请用这个声音读一段话。
我们把模型导出，在另一台机器上运行，然后比较两边的结果。他说的话很清楚，大家都听懂了。
""".splitlines()


def train_tokenizer() -> bytes:
    """The bytes of tokenizer.model; the same on every run."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=NUM_PIECES,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="nmt_nfkc",
        add_dummy_prefix=True,
        split_digits=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        user_defined_symbols=list(SPECIAL),
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()
