"""Stage 3 of 5: records → documents.

A document is a text, a pair or a chat, and belongs to a split. Fields and roles are found here, and
the split is decided. Sources are read a second time where documents are few, to deduplicate them,
and to train a tokenizer.
"""
