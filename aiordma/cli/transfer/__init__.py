"""Copying files over a byte stream: the protocol of `aiordma cp` and `aiordma serve`.

Everything on the wire is a frame (frames.py): a short message in JSON, or a piece of a file.

    client                     server
    Put(name, size)      ->                      it makes a temporary file beside the name
                         <-    Ready(size)
    pieces of the file   ->
    Done(sha256)         ->                      it compares, and renames the file
                         <-    Done(sha256)

    Get(name)            ->
                         <-    Ready(size), pieces of the file, Done(sha256)

Either side may say Failed(reason, text) instead of the next frame, even in the middle of a file.
One connection carries one file.  The checksum comes last, so that a file is read only once.

`exchange` moves frames over streams, and `disk` the bytes of a file, one part ahead of the
connection or behind it; `client` and `server` are the two roles.
"""
