"""Who does what, in which order: programs, actions, orders, messages, checks, times, drawings. No torch.

Program ──order──▶ Schedule ──check──▶ ──lower──▶ executor
                      └──times──▶ draw_text, draw_svg
"""

from smpar.schedule.actions import Action, Kind, Schedule
from smpar.schedule.chains import gpipe, interleaved_1f1b, one_f_one_b
from smpar.schedule.check import check
from smpar.schedule.draw import draw_svg, draw_text
from smpar.schedule.lower import Message, channel_order, lower, message_of, received_before
from smpar.schedule.memory import Step, held, memory
from smpar.schedule.orders import (
    fill_drain,
    in_turn,
    list_schedule,
    make_schedule,
    placement,
    split_schedule,
    virtual_stages_of,
)
from smpar.schedule.program import Dependency, Flow, Program, Segment, Task, Transfer
from smpar.schedule.simulate import Timed, bubble, makespan, times
from smpar.schedule.zero_bubble import zbv, zero_bubble

__all__ = [
    "Action",
    "Dependency",
    "Flow",
    "Kind",
    "Message",
    "Program",
    "Schedule",
    "Segment",
    "Step",
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
    "held",
    "in_turn",
    "interleaved_1f1b",
    "list_schedule",
    "lower",
    "make_schedule",
    "makespan",
    "memory",
    "message_of",
    "one_f_one_b",
    "placement",
    "received_before",
    "split_schedule",
    "times",
    "virtual_stages_of",
    "zbv",
    "zero_bubble",
]
