"""A run as a picture: who talked to whom, who waits, and for whom."""

from distlab.trace.layout import Arrow, Bar, Schedule, schedule
from distlab.trace.page import page
from distlab.trace.text import draw_text
from distlab.trace.timeline import draw_timeline

__all__ = ["Arrow", "Bar", "Schedule", "draw_text", "draw_timeline", "page", "schedule"]
