"""Notes for the user, which all stages add to."""

MAX_NAMES = 3  # of files, in one note
LEFT_OUT_NOTE = "files left out, as they are no readable text"


class Notes(dict[str, list]):
    """Text of a note → how often it applies, and the first names that it applies to.

    A text starts with a plural noun: "files left out, …". It is a value of JSON.
    """

    def add(self, text: str, count: int = 1, *names: str) -> None:
        """Count a note, with names that are listed after it; they may not be Unicode."""
        if count:
            entry = self.setdefault(text.encode(errors="replace").decode(), [0])
            entry[0] += count
            listed = names[: MAX_NAMES + 1 - len(entry)]
            entry += [name.encode(errors="replace").decode() for name in listed]

    def merge(self, *others: dict[str, list]) -> "Notes":
        """Add the notes of other objects."""
        for notes in others:
            for text, (count, *names) in notes.items():
                self.add(text, count, *names)
        return self

    def counts(self) -> dict[str, int]:
        """Return each text, with its names, and how often it applies."""
        counts = {}
        for text, (count, *names) in sorted(self.items()):
            more = ["…"] if names and count > len(names) else []
            counts[text + ": " * bool(names) + ", ".join([*names, *more])] = count
        return counts
