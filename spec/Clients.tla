------------------------------ MODULE Clients ------------------------------
(***************************************************************************)
(* What clients may see. This module knows nothing of homes, bases and     *)
(* versions: only the order of stores, releases and acquires decides which *)
(* values a read may return. docs/consistency.md, "In plain words", says   *)
(* the same in prose.                                                      *)
(*                                                                         *)
(* A device's stores happen before everything that an acquire or a CPU     *)
(* program does after their release returned. Stores of CPU programs       *)
(* happen before everything that an acquire returns afterwards. A read may *)
(* return a store's value, unless the reader knows of a later store. So    *)
(* bytes may be seen before their release, and two stores may be seen in   *)
(* any order if neither knows the other.                                   *)
(***************************************************************************)
EXTENDS History

VARIABLES size,   \* size[p] is how many bytes of page p lie before end of file
          hist,   \* hist[p][i] is the history of byte i of page p
          shows   \* shows[p][i][r] is what reader r would see of that byte now

(* The values that a reader may see, or Nothing while it may not read. *)
Allowed ==
    \E now \in {shows} :   \* evaluated once
        \A p \in Pages, i \in 1..B, r \in Readers :
            \/ now[p][i][r] = Nothing
            \/ i <= size[p] /\ now[p][i][r] \in May(hist[p][i], AgentOf(r))

Init == /\ hist = [p \in Pages |-> [i \in 1..B |-> NewByte]]
        /\ size \in [Pages -> 0..B]

(* One event for some bytes of a page. *)
Changes(p, I, Op(_)) ==
    /\ hist' = [hist EXCEPT ![p] = TLCEval([i \in 1..B |-> IF i \in I THEN Tidy(Op(hist[p][i])) ELSE hist[p][i]])]
    /\ UNCHANGED size

(* A client stores. A device's store past end of file has no effect. *)
Store(a, p, I, v) == /\ \A i \in I : i <= size[p] /\ v \notin hist[p][i].live
                     /\ LET Op(h) == Stored(h, a, v) IN Changes(p, I, Op)

(* A device acquires a page: it knows the stores of CPU programs, and those that releases published. *)
Acquire(d, p) == LET Op(h) == Acquired(h, d) IN Changes(p, 1..B, Op)

(* A release of some pages begins. *)
Publish(s, d, P) ==
    /\ hist' = [p \in Pages |-> [i \in 1..B |-> IF p \in P THEN Tidy(Published(hist[p][i], s, d)) ELSE hist[p][i]]]
    /\ UNCHANGED size

(* The release returns: every client may know of it. *)
Finish(s) == /\ hist' = [p \in Pages |-> [i \in 1..B |-> Tidy(Finished(hist[p][i], s))]]
             /\ UNCHANGED size

(* If a file is truncated, or grows, all clients see zeros there at once. *)
Resize(p, n) == /\ size' = [size EXCEPT ![p] = n]
                /\ hist' = [hist EXCEPT ![p] = [i \in 1..B |-> IF i > n \/ i > size[p] THEN NewByte ELSE hist[p][i]]]

(* A write makes the file longer: all clients see zeros there, then the writer's byte. *)
Append(p, I, v) == \E n \in I :
    /\ n > size[p] /\ \A i \in I : i <= n
    /\ size' = [size EXCEPT ![p] = n]
    /\ hist' = [hist EXCEPT ![p] = [i \in 1..B |->
                    LET h == IF i > size[p] THEN NewByte ELSE hist[p][i]
                    IN  IF i \in I THEN Tidy(Stored(h, CPU, v)) ELSE h]]

(* fsync returns: the stores that it covers cannot be lost with a device. *)
Sync(p) == LET Op(h) == Synced(h) IN Changes(p, 1..B, Op)

(* A device is lost, and with it some of its unsynced stores. Older stores may be seen again. *)
Lose(d) == /\ \A p \in Pages, i \in 1..B :
                 LET gone == hist[p][i].live \ hist'[p][i].live
                 IN  /\ gone \subseteq Losable(hist[p][i], d)
                     /\ hist'[p][i] = Without(hist[p][i], gone)
           /\ UNCHANGED size

Next == \/ \E p \in Pages, I \in Parts, v \in Ids, a \in Agents : Store(a, p, I, v)
        \/ \E p \in Pages, I \in Parts, v \in Ids : Append(p, I, v)
        \/ \E p \in Pages, d \in Devices : Acquire(d, p)
        \/ \E s \in Slots, d \in Devices, P \in SUBSET Pages : Publish(s, d, P)
        \/ \E s \in Slots : Finish(s)
        \/ \E p \in Pages, n \in 0..B : Resize(p, n)
        \/ \E p \in Pages : Sync(p)
        \/ \E d \in Devices : MaxLosses > 0 /\ Lose(d)

(* Any value that may be seen may be seen at any time. *)
Spec == Init /\ [][Next]_<<size, hist>> /\ []Allowed
=============================================================================
