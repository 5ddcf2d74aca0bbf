------------------------------ MODULE History ------------------------------
(***************************************************************************)
(* The history of one byte: which stores were made, and which owners know  *)
(* of them. Each store has its own value, so a value identifies its store. *)
(* Value 0 is the file's first content. Values that no reader may see any  *)
(* more are used again, so histories of any length have few states.        *)
(***************************************************************************)
EXTENDS Naturals, FiniteSets, TLC

CONSTANTS Devices,    \* owners above the CPU, which is 0: a set of numbers from 1
          Pages,
          B,          \* bytes of a page
          K,          \* the most stores of a byte that somebody may still see
          Slots,      \* the releases that may be under way at once
          MaxLosses,  \* devices that may be lost
          Nothing     \* what is seen by a reader who may not look

CPU == 0
Agents == {CPU} \cup Devices
Ids == 0..K
Parts == {{i} : i \in 1..B} \cup {1..B}   \* what is stored at once: a byte, or a whole page

(* CPU programs read through the kernel's pages or past them; programs of a device read its memory. *)
Cache == 0     \* a read through the kernel's pages
Past == 1000   \* a read past them (O_DIRECT)
Readers == {Cache, Past} \cup Devices
AgentOf(r) == IF r \in Devices THEN r ELSE CPU

(* live: stores that some reader may see. by[v]: the owner that stored v. before[v]: stores that this owner knew of.
   known[a]: stores that a knows of. pub[s]: the stores that release s will publish. safe: stores that no device's loss
   undoes. *)
NewByte == [live   |-> {0},
            before |-> TLCEval([v \in Ids |-> {}]),
            by     |-> TLCEval([v \in Ids |-> CPU]),
            known  |-> TLCEval([a \in Agents |-> {0}]),
            pub    |-> TLCEval([s \in Slots |-> {}]),
            safe   |-> {0}]

Superseded(h, a) == UNION {h.before[v] : v \in h.known[a]}
May(h, a) == h.live \ Superseded(h, a)

Stored(h, a, v) == [h EXCEPT !.live = @ \cup {v}, !.before[v] = h.known[a], !.by[v] = IF MaxLosses > 0 THEN a ELSE CPU,
                             !.known[a] = @ \cup {v}]
Acquired(h, d) == [h EXCEPT !.known[d] = @ \cup h.known[CPU]]
Published(h, s, d) == [h EXCEPT !.pub[s] = h.known[d]]
Finished(h, s) == [h EXCEPT !.known[CPU] = @ \cup h.pub[s], !.pub[s] = {}]
Synced(h) == [h EXCEPT !.safe = IF MaxLosses > 0 THEN h.known[CPU] ELSE @]

Losable(h, d) == {v \in h.live : h.by[v] = d} \ h.safe

Without(h, gone) ==
    [h EXCEPT !.live = @ \ gone, !.safe = @ \ gone,
              !.before = TLCEval([v \in Ids |-> IF v \in gone THEN {} ELSE h.before[v] \ gone]),
              !.by = TLCEval([v \in Ids |-> IF v \in gone THEN CPU ELSE h.by[v]]),
              !.known = TLCEval([a \in Agents |-> h.known[a] \ gone]),
              !.pub = TLCEval([s \in Slots |-> h.pub[s] \ gone])]

(* A store is forgotten when all owners know that it was superseded. *)
Final(h) == IF MaxLosses = 0 THEN h.live ELSE {v \in h.live : h.by[v] = CPU \/ v \in h.safe}
Forgotten(h) == {v \in h.live : \A a \in Agents : v \in UNION {h.before[t] : t \in h.known[a] \cap Final(h)}}
Tidy(h) == LET gone == Forgotten(h) IN IF gone = {} THEN h ELSE Without(h, gone)
=============================================================================
