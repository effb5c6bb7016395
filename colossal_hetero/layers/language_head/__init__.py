"""The head of language models as a block: rows of the vocabulary migrate, and the loss works on any rows."""
