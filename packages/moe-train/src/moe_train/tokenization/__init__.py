"""From text and conversations to token ids: tokenizer, chat template and end tokens of a job.

May import: config, cache, errors; tokenizers, jinja2. Not torch: it is used by many processes.
"""

from moe_train.tokenization.agreement import describe_choice as describe_choice
from moe_train.tokenization.agreement import model_ids as model_ids
from moe_train.tokenization.chat import ChatTokens as ChatTokens
from moe_train.tokenization.choose import choose_tokenizer as choose_tokenizer
from moe_train.tokenization.choose import load_tokenizer as load_tokenizer
from moe_train.tokenization.choose import train_settings as train_settings
from moe_train.tokenization.choose import train_tokenizer as train_tokenizer
from moe_train.tokenization.choose import vocabulary_rows as vocabulary_rows
from moe_train.tokenization.folder import read_files as read_files
from moe_train.tokenization.text_tokenizer import TextTokenizer as TextTokenizer
from moe_train.tokenization.text_tokenizer import whole_text as whole_text
