"""From files to batches: find the corpus, train a tokenizer, encode once, pack, order."""
