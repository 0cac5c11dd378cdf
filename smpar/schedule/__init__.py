"""Who does what, in which order: programs, actions, orders, messages, checks, times, drawings. No torch.

Program ──order──▶ Schedule ──check──▶ ──lower──▶ executor
                      └──times──▶ draw_text, draw_svg
"""

from smpar.schedule.actions import Action, Kind, Schedule
from smpar.schedule.check import check
from smpar.schedule.draw import draw_svg, draw_text
from smpar.schedule.lower import Message, channel_order, lower, message_of
from smpar.schedule.orders import fill_drain, gpipe, list_schedule, make_schedule, one_f_one_b
from smpar.schedule.program import Dependency, Flow, Program, Segment, Task, Transfer
from smpar.schedule.simulate import Timed, bubble, makespan, times

__all__ = [
    "Action",
    "Dependency",
    "Flow",
    "Kind",
    "Message",
    "Program",
    "Schedule",
    "Segment",
    "Task",
    "Timed",
    "Transfer",
    "bubble",
    "channel_order",
    "check",
    "draw_svg",
    "draw_text",
    "fill_drain",
    "gpipe",
    "list_schedule",
    "lower",
    "make_schedule",
    "makespan",
    "message_of",
    "one_f_one_b",
    "times",
]
