"""Makes a model of a few hundred kilobytes with random weights: two Llama layers and a
byte-level tokenizer trained on the text below. It talks nonsense, but the same nonsense
every time. Usage: tiny_model.py DIRECTORY"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = [
    "The front door of a fleet of language models counts every token that passes.",
    "A bucket of a hundred tokens admits exactly a hundred, and then it says when to come back.",
    "Grüß Gott, bonjour, buenos días, 你好, こんにちは, Привет.",
    '{"city": "Rome", "days": 3, "units": "metric"} [1, 2, 3] {"name": "get_weather", "arguments": {}}',
]

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['content'] is string %}{{ m['content'] }}{% elif m['content'] %}"
    "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def main(out: str) -> None:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token="<|pad|>", bos_token="<|begin|>", eos_token="<|end|>",
        additional_special_tokens=SPECIAL[3:], chat_template=TEMPLATE, model_max_length=2048)
    fast.save_pretrained(out)

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(fast), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
        bos_token_id=fast.bos_token_id, eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id,
        tie_word_embeddings=False, initializer_range=0.5, dtype="float32",
    )).save_pretrained(out)


if __name__ == "__main__":
    main(sys.argv[1])
