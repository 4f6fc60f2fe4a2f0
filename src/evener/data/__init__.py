"""Room `data`: the cursor, the order of the rows, and how a rank's rows of an update are read.

source_of(data)  ->  Source      what the user gave, looked at once
Order(rows, seed, kind)          a pure function of (seed, epoch)
Feed(source, order, ...)         portions: this rank's pieces of each update, on the device
Cursor, position, ...     the integer algebra of positions
"""

from evener.data.cursor import Cursor as Cursor
from evener.data.cursor import position as position
from evener.data.cursor import updates_in as updates_in
from evener.data.feed import Feed as Feed
from evener.data.feed import Piece as Piece
from evener.data.feed import Portion as Portion
from evener.data.order import Order as Order
from evener.data.source import Source as Source
from evener.data.source import source_of as source_of

__all__ = ["Cursor", "Feed", "Order", "Piece", "Portion", "Source", "position", "source_of", "updates_in"]
