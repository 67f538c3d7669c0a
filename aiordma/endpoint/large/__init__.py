"""Large messages: the sender exposes the bytes, the receiver reads them and answers with DONE.

Theory of operation
    *Exchange.*  The sender has the bytes in memory that is registered for remote reading, and
    announces its address, key and length in a RENDEZVOUS frame.  The receiver takes a registered
    buffer from its pool, reads the message in pieces, several at a time, and answers with DONE.  So
    how much memory is pinned depends on the messages in progress, and not on the largest message
    that is possible.  With the first such message the queue pair begins to allow remote reads.  The
    peer can access what is registered for it, and DONE ends the registration.

    An exchange proceeds inside the drain that brings the announcement, the completion of a READ, or
    DONE.  It runs as a task only where it has to wait: for a lease, or for a thread that registers,
    checks or copies more than 1 MiB.

    *Limits.*  An announcement costs the peer only 32 bytes.  So nothing is allocated for it until
    the message is the next one for `recv()`, or until there is room to fetch it ahead; and in both
    cases only with a lease (`memory.governor`).  From then on, some bytes have to arrive within
    each time limit, or the connection is given up, because work requests behind a READ that hangs
    would hang, too.  While another source waits for the memory, the message also has to arrive at a
    minimum rate.

    *Copies.*  The peer reads directly from the caller's buffer, which is registered for this
    message only, and neither side copies anything.  But a message of up to `COPIED_BYTES` is copied
    into a buffer that stays registered, because registering and deregistering memory takes longer
    than such a copy.  This buffer never contains anything but messages to the same peer.

    *Memory of the program.*  The program may provide memory for a message of more than
    `COPIED_BYTES` (`recv_into`).  It is registered for this message only, without remote rights,
    and the READs write directly to it.  After the first `recv_into` the library no longer fetches
    such messages ahead.  Before the call ends, even by a cancellation, the memory is deregistered,
    which waits for READs in progress.  DONE is sent only after that, so until then the message can
    be read again.

    The answer to a request is read in the same way into memory that its task provides
    (`request(into=)`).  The announcement contains the immediate, which is the number of the
    request, so the memory is known before any byte is read.  The answer is offered to that task,
    which reads it; several answers may be read at a time.  In its turn, the task that reads all
    requests gets an empty message.  The answer to an abandoned request is not read; DONE is sent at
    once.

    A cancellation of a send ends the wait only.  The memory, and with it the caller's buffer, stays
    exposed until DONE arrives or the queue pair is gone, because the peer may be reading it.

    *Landings.*  A message of up to 1 MiB needs no exchange if the peer has a free landing for it:
    registered memory, to which this side writes the message with one RDMA WRITE with immediate.
    The immediate uses up a receive, so it takes a credit like any other message.  `recv()` copies
    the message out of the landing, and the next frame to the sender says that the landing is free.
    If the landing is in use, or too small, the message is sent as if there were none.

    A landing is made when a message arrives that could have used it.  A larger message leads to a
    larger landing, and the smaller ones stay, because the peer may be writing to them.  Before the
    sender writes a message, it copies it to memory of its own, the stage, because the program may
    change its bytes as soon as `send()` returns.  The peer can write to a landing at any time, as
    it can to the ring of a stream.  So the message is what `recv()` has copied, and a landing
    contains nothing else.

    *Checksums.*  If the network reorders packets, Soft-RoCE may complete a READ whose last bytes
    have not arrived (docs/surprises.md).  So the receiver can ask for a checksum, which the sender
    computes from the registered bytes.  A mismatch ends the connection.  Reading again would not
    help, because after this fault the queue pair gets no more answers.

    *iWARP.*  On iWARP the peer gets the key of the memory that a READ writes to, and can write
    there as long as the memory is registered.  Neither deregistering it nor taking the remote
    rights away from the queue pair reliably stops accesses in progress.  So the bytes are copied
    before they are checked, and the copy is the message.  A message is also copied if the program
    keeps so many messages that their memory exceeds the budget.

`exposure` has the sender's side, `fetch` the receiver's, `landings` the memory of messages that are
written, and `messages` joins them.  `endpoint.announced` has what the receiver of all messages
knows of a large one.
"""
