"""Count the bytes of a rank's tensors: those that live, and the most that ever did."""

from __future__ import annotations


class Tally:
    """A sum of bytes with two peaks: since the script's last reset, and of the run.

    A script that measures one step resets the peak before it
    (`torch.cuda.reset_peak_memory_stats`). The report's peak isn't affected by that.
    """

    def __init__(self) -> None:
        self.live = self.peak = self.peak_since_reset = 0

    def change(self, num_bytes: int) -> bool:
        """Add bytes, or take some away; return True if it's the run's new peak."""
        self.live += num_bytes
        if self.live > self.peak_since_reset:
            self.peak_since_reset = self.live
            if self.live > self.peak:
                self.peak = self.live
                return True
        return False

    def reset_peak(self) -> None:
        """From now on the script sees the peak of what follows."""
        self.peak_since_reset = self.live
