"""Tables that commands have written, read back."""

import csv


def rows_of(folder, name="table.csv"):
    with (folder / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
