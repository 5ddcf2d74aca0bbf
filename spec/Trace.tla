------------------------------- MODULE Trace -------------------------------
(***************************************************************************)
(* Whether clients saw only what Clients allows, in traces of real         *)
(* programs. internal/model makes the module TraceData from what programs  *)
(* did to a few watched bytes, on a mount or on lrc alone.                 *)
(***************************************************************************)
EXTENDS History, Sequences, TraceData

VARIABLES trace,   \* which trace
          at,      \* the event that is next
          h,       \* h[w] is the history of watched byte w
          value    \* value[w][v] is what store v of byte w left

Event == Traces[trace][at]
More == at <= Len(Traces[trace])

NextStore(w) == CHOOSE v \in Ids : value[w][v] = Nothing /\ \A u \in Ids : u < v => value[w][u] # Nothing
Change(Op(_)) == h' = [w \in Watched |-> IF w \in Event.w THEN TLCEval(Tidy(Op(h[w]))) ELSE h[w]]

Init == /\ trace \in 1..Len(Traces)
        /\ at = 1
        /\ h = [w \in Watched |-> NewByte]
        /\ value = [w \in Watched |-> [v \in Ids |-> IF v = 0 THEN 0 ELSE Nothing]]

Store == LET w == CHOOSE w \in Event.w : TRUE
             v == NextStore(w)
             Op(b) == Stored(b, Event.a, v)
         IN  /\ Change(Op)
             /\ value' = [value EXCEPT ![w][v] = Event.v]

Other == /\ CASE Event.e \in {"read", "look"} -> UNCHANGED h
              [] Event.e = "acquire" -> LET Op(b) == Acquired(b, Event.a) IN Change(Op)
              [] Event.e = "publish" -> LET Op(b) == Published(b, Event.v, Event.a) IN Change(Op)
              [] Event.e = "finish" -> LET Op(b) == Finished(b, Event.v) IN Change(Op)
              [] Event.e = "zero" -> LET Op(b) == NewByte IN Change(Op)
         /\ UNCHANGED value

Next == /\ More
        /\ at' = at + 1
        /\ UNCHANGED trace
        /\ IF Event.e = "store" THEN Store ELSE Other

Spec == Init /\ [][Next]_<<trace, at, h, value>>

(* A view has no stores of its own. A view that was just acquired knows the same stores as programs on the CPU. *)
Seen == More /\ Event.e \in {"read", "look"}
Reader == IF Event.e = "look" THEN CPU ELSE Event.a
ReadsAreAllowed == Seen =>
    \A w \in Event.w : \E v \in May(h[w], Reader) : value[w][v] = Event.v
=============================================================================
