"""Stage 2 of 5: sources → records.

A record is the fields of a row, or the text of a file. Encodings, byte order marks and line ends
are handled here and nowhere else: every text in a record is valid Unicode whose lines end with LF.
A file is read once, in the order of its records.
"""
