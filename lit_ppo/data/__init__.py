"""Prompts: read, checked, tokenized, and dealt to the ranks in an order that a resumed run continues exactly.

Everything that can be wrong with a file is found when `PromptDataModule` is constructed, before a tokenizer or a model
loads. Tokenization happens in its `setup`, with the tokenizer of the LightningModule.
"""

from lit_ppo.data.encode import encode
from lit_ppo.data.loader import PromptLoader
from lit_ppo.data.module import PromptDataModule

__all__ = ["PromptDataModule", "PromptLoader", "encode"]
