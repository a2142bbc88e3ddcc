"""Rows: read, checked, tokenized, and dealt to the ranks in an order that a resumed run continues exactly.

Everything that can be wrong with a file is found when a data module is constructed, before a tokenizer or a model
loads. Tokenization happens in its `setup`, with the tokenizer of the LightningModule.
"""

from lit_ppo.data.answers import SFTDataModule
from lit_ppo.data.encode import encode
from lit_ppo.data.loader import PromptLoader
from lit_ppo.data.module import PromptDataModule
from lit_ppo.data.pairs import PreferenceDataModule

__all__ = ["PreferenceDataModule", "PromptDataModule", "PromptLoader", "SFTDataModule", "encode"]
