"""A run as a picture: who talked to whom, who waits, and for whom."""

from distlab.trace.chakra import to_chakra
from distlab.trace.critical_path import Segment, critical_path
from distlab.trace.journals import trace_of
from distlab.trace.layout import Arrow, Bar, Schedule, schedule
from distlab.trace.links import bus_bandwidth, utilisation
from distlab.trace.model import Link, Trace
from distlab.trace.page import page, to_html
from distlab.trace.perfetto import to_perfetto
from distlab.trace.text import draw_text
from distlab.trace.timeline import draw_timeline

__all__ = [
    "Arrow",
    "Bar",
    "Link",
    "Schedule",
    "Segment",
    "Trace",
    "bus_bandwidth",
    "critical_path",
    "draw_text",
    "draw_timeline",
    "page",
    "schedule",
    "to_chakra",
    "to_html",
    "to_perfetto",
    "trace_of",
    "utilisation",
]
