"""One upstream service over HTTP/1.1: buffered exchanges and streamed pass-through over one pool of connections.

answer      bytes in, an answer out: knows HTTP, knows no socket
stream      the rest of an answer that is relayed as it comes
connection  one connection and the one request it carries; nothing is ever sent twice
dial        making a connection; errors of sockets and TLS become words of RFC 9209 here and nowhere else
pool        `HttpUpstream`: which connection carries which request, who waits, when an idle one is closed
uploading   a request whose body is streamed

What may not live here: what a failure means for a record (`decision`), which headers are forwarded (`wire`).
"""

from gateway.upstream.pool import HttpUpstream, UpstreamObserver

__all__ = ["HttpUpstream", "UpstreamObserver"]
