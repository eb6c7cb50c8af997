"""Tasks whose samples are the rows of a file or of a dataset on the hub."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.errors import UsageError
from kvtool.evaluation.samples.data import PRESETS, Data, Rows, read_rows
from kvtool.evaluation.tasks.asking import Asking
from kvtool.evaluation.tasks.settings import Samples


class Read(Asking):
    """A task that reads its samples.

    Nothing is downloaded unless asked for: a suite leaves the task out as long as it has no data.

    Attributes:
        data: a file, a folder with the benchmark's file in it, or a dataset on the hub.
        samples: how many rows, from the first; all by default.
    """

    data: Data | None = None
    samples: Samples | None = None

    @property
    def preset(self) -> str:
        """The name of the usual data: that of the suite."""
        return self.name.partition("/")[0]

    @property
    def part(self) -> str:
        """The name of the task without its suite."""
        return self.name.rpartition("/")[2]

    @property
    def missing(self) -> str | None:
        """Which data are needed."""
        if self.data is not None:
            return None
        hub = PRESETS[self.preset]["hub"]
        return f"data: a file, or `{self.preset}` for {hub} on the hub"

    def on_hub(self, data: Data) -> Data:
        """Return the part of the benchmark's dataset on the hub that this task reads."""
        return data

    def read(self, columns: Sequence[str], stem: str) -> Rows:
        """Read the rows.

        Args:
            columns: what every row must have.
            stem: name of the task's file in a folder.

        Raises:
            UsageError: no data are given, or there is no such file.
            KvtoolError: data that cannot be read or lack a column.
        """
        if self.data is None:
            raise UsageError(f"task `{self.name}` needs {self.missing}")
        own = PRESETS.get(self.preset, {}).get("hub")
        data = self.on_hub(self.data) if own and self.data.hub == own else self.data
        return read_rows(data, columns, task=self.name, stem=stem)


class ShortAnswer(Read):
    """A task that reads its samples and wants short answers, before which no model need think.

    Attributes:
        thinking: whether the model thinks before it answers, for chat templates that know
            `enable_thinking`; None leaves it to them. A thought needs more `max_new_tokens` than
            these tasks allow by themselves.
    """

    thinking: bool | None = False

    @property
    def enable_thinking(self) -> bool | None:
        return self.thinking
