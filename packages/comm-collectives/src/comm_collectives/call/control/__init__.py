"""The room `control`."""

from comm_collectives.call.control.board import Arrival as Arrival
from comm_collectives.call.control.board import Board as Board
from comm_collectives.call.control.meeting import BoardMeeting as BoardMeeting
from comm_collectives.call.control.meeting import Meeting as Meeting
from comm_collectives.call.control.meeting import Met as Met
from comm_collectives.call.control.meeting import WireMeeting as WireMeeting
from comm_collectives.call.control.meeting import open_meeting as open_meeting
from comm_collectives.call.control.sheets import SHEET_BYTES as SHEET_BYTES
from comm_collectives.call.control.sheets import Sheets as Sheets
