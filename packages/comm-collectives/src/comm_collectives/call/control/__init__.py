"""The room `control`."""

from comm_collectives.call.control.mailbox import Arrival as Arrival
from comm_collectives.call.control.mailbox import Board as Board
from comm_collectives.call.control.exchange import BoardMeeting as BoardMeeting
from comm_collectives.call.control.exchange import Meeting as Meeting
from comm_collectives.call.control.exchange import Met as Met
from comm_collectives.call.control.exchange import WireMeeting as WireMeeting
from comm_collectives.call.control.exchange import open_meeting as open_meeting
from comm_collectives.call.control.inline_pages import SHEET_BYTES as SHEET_BYTES
from comm_collectives.call.control.inline_pages import Sheets as Sheets
