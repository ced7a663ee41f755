"""A dense model made a Mixture-of-Experts one: its MLPs become experts, a router is drawn.

A room of its own: the only job whose output is of another family than its source.

May import: run, plan, outputs, operations, specs, files.
"""

from weight_convert.upcycling.upcycling import Upcycling as Upcycling
from weight_convert.upcycling.upcycling import upcycle as upcycle
