"""Text encoders of transformers, tiny and with random weights, as folders."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast, CLIPTextConfig, CLIPTextModel, T5Config, T5Model

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "green", "apple", "flag", "face"]


def make_bert(folder: Path, width: int = 16, seed: int = 0) -> Path:
    """A BERT that knows eleven words."""
    return _save(BertModel(_bert_config(width, seed)), folder)


def make_clip(folder: Path) -> Path:
    """A CLIP text tower; BERT's tokenizer serves it as well."""
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
    )
    return _save(CLIPTextModel(config), folder)


def make_t5(folder: Path) -> Path:
    """A T5 of both halves, as its checkpoints are."""
    torch.manual_seed(0)
    return _save(
        T5Model(T5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)), folder
    )


def _bert_config(width: int, seed: int) -> BertConfig:
    torch.manual_seed(seed)
    return BertConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )


def _save(model: torch.nn.Module, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)  # type: ignore[operator]
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=8).save_pretrained(folder)
    return folder
