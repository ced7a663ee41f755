"""From text and conversations to token ids: tokenizer, chat template and end tokens of a job.

May import: model, config, cache, errors; tokenizers, jinja2.
"""

from moe_train.tokenization.bpe import train_tokenizer as train_tokenizer
from moe_train.tokenization.chat import ChatTokens as ChatTokens
from moe_train.tokenization.choose import choose_tokenizer as choose_tokenizer
from moe_train.tokenization.text_tokenizer import TextTokenizer as TextTokenizer
from moe_train.tokenization.text_tokenizer import load_tokenizer as load_tokenizer
