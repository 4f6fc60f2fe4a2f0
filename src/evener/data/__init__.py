"""Room `data`: the cursor, the order of the rows, and how a rank's rows of an update are read.

source_of(data)  ->  Source      what the user gave, looked at once
Order(rows, seed, kind)          a pure function of (seed, epoch)
make_feed(source, ...)           a Feed, or a StreamFeed: portions, this rank's pieces of each update, on the device
Cursor, updates_in, ...          the integer algebra of positions
"""

from evener.data.cursor import Cursor as Cursor
from evener.data.cursor import Mark as Mark
from evener.data.cursor import updates_in as updates_in
from evener.data.feed import Feed as Feed
from evener.data.feed import Portion as Portion
from evener.data.order import Order as Order
from evener.data.source import is_stream as is_stream
from evener.data.source import source_of as source_of
from evener.data.stream_feed import make_feed as make_feed
