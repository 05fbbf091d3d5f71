"""Stage 1 of 5: names on the command line → sources.

A source is a file, an address or a dataset of rows, with its kind, size, version, and the split
that its name says. Nothing is decoded here. Folders are listed in the same order everywhere.
"""
