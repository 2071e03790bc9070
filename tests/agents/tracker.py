"""A tracker of accelerate's kind that keeps what it is given."""

from pathlib import Path
from typing import Any, ClassVar

from accelerate.tracking import GeneralTracker


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False
    main_process_only = False
    made: ClassVar[list["Recorder"]] = []
    """Those made by name."""

    def __init__(self, project: str = "", *, file: Path | None = None) -> None:
        super().__init__()
        self.project, self.file, self.started, self.finished = project, file, 0, 0
        self.settings: dict[str, Any] = {}
        self.steps: dict[int | None, dict[str, float]] = {}
        if project:
            self.made.append(self)

    @property
    def tracker(self) -> None:
        """It has no library behind it."""

    def start(self) -> None:
        self.started += 1

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings |= values

    def log(self, values: dict[str, Any], step: int | None) -> None:
        self.steps[step] = values
        if self.file is not None:
            self.file.write_text(str(list(self.steps)))

    def finish(self) -> None:
        self.finished += 1
