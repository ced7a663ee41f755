"""LoRA in peft's files: put into a model.

A room of its own, since it knows another library's files.

May import: run, plan, outputs, operations, files.
"""

from weight_convert.adapters.adapter import Adapter as Adapter
from weight_convert.adapters.adapter import read_adapter as read_adapter
from weight_convert.adapters.lora import lora as lora
