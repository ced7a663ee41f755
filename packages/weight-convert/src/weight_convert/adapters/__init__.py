"""LoRA in peft's files: put into a model, or taken from two.

A room of its own, since it knows another library's files.

May import: run, plan, outputs, operations, files, staging.
"""

from weight_convert.adapters.adapter import Adapter as Adapter
from weight_convert.adapters.adapter import read_adapter as read_adapter
from weight_convert.adapters.extracting import extract_lora as extract_lora
from weight_convert.adapters.lora import lora as lora
