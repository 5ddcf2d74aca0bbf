------------------------------ MODULE Clients ------------------------------
(***************************************************************************)
(* What clients may see. This module knows nothing of homes, bases and     *)
(* versions: the order of stores, releases and acquires alone says which   *)
(* values a read may return. docs/consistency.md, "In plain words", is the *)
(* same in prose.                                                          *)
(*                                                                         *)
(* A device's stores happen before whatever an acquire or a CPU program    *)
(* does after their release returned. What CPU programs stored happens     *)
(* before whatever an acquire returns afterwards. A read may return what a *)
(* store left, unless the reader knows of a store that came after it. So   *)
(* bytes may be seen before their release, and two stores of which neither *)
(* knows the other may be seen in any order.                               *)
(***************************************************************************)
EXTENDS History

VARIABLES size,   \* size[p] is how many bytes of page p lie before end of file
          hist,   \* hist[p][i] is the history of byte i of page p
          shows   \* shows[p][i][r] is what reader r would see of that byte now

(* What a reader may see, and Nothing while it may not look. *)
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

(* A client stores. A device's store past end of file is nobody's. *)
Store(a, p, I, v) == /\ \A i \in I : i <= size[p] /\ v \notin hist[p][i].live
                     /\ LET Op(h) == Stored(h, a, v) IN Changes(p, I, Op)

(* A device acquires a page: it knows what programs on the CPU stored, and what releases told. *)
Acquire(d, p) == LET Op(h) == Acquired(h, d) IN Changes(p, 1..B, Op)

(* A release of some pages begins. *)
Publish(s, d, P) ==
    /\ hist' = [p \in Pages |-> [i \in 1..B |-> IF p \in P THEN Tidy(Published(hist[p][i], s, d)) ELSE hist[p][i]]]
    /\ UNCHANGED size

(* The release returns: everybody may know of it. *)
Finish(s) == /\ hist' = [p \in Pages |-> [i \in 1..B |-> Tidy(Finished(hist[p][i], s))]]
             /\ UNCHANGED size

(* Where a file is cut, or grows, everybody has zeros at once. *)
Resize(p, n) == /\ size' = [size EXCEPT ![p] = n]
                /\ hist' = [hist EXCEPT ![p] = [i \in 1..B |-> IF i > n \/ i > size[p] THEN NewByte ELSE hist[p][i]]]

(* A write makes the file longer: everybody has zeros there, then the writer's byte. *)
Append(p, I, v) == \E n \in I :
    /\ n > size[p] /\ \A i \in I : i <= n
    /\ size' = [size EXCEPT ![p] = n]
    /\ hist' = [hist EXCEPT ![p] = [i \in 1..B |->
                    LET h == IF i > size[p] THEN NewByte ELSE hist[p][i]
                    IN  IF i \in I THEN Tidy(Stored(h, CPU, v)) ELSE h]]

(* fsync returns: what it covered is not lost with a device. *)
Sync(p) == LET Op(h) == Synced(h) IN Changes(p, 1..B, Op)

(* A device is lost, and with it some of its stores that nobody synced. Older ones may be seen again. *)
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

(* What is seen may change at any time, among what may be seen. *)
Spec == Init /\ [][Next]_<<size, hist>> /\ []Allowed
=============================================================================
