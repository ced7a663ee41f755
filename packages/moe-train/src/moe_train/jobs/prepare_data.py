"""What a job trains on: `moe-train data` prepares it and shows it.

print(prepare_and_describe(config))
"""

from moe_train.config import Config
from moe_train.data import describe_corpus, prepare
from moe_train.errors import check_type


def prepare_and_describe(config: Config) -> str:
    """Prepare the corpus, or read what the cache has through, and describe it.

    Pairs, which are not trained on yet, are read and checked too.

    Raises:
        FileNotFoundError: a corpus entry or the tokenizer does not exist.
        ValueError: a file or row cannot be used; names file, line or row, and field.
    """
    check_type("config", config, Config)
    prepared = prepare(config, verify=True, only_check=True)
    return describe_corpus(prepared, sequence_length=config.data.sequence_length)
