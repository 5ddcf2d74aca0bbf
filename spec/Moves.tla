------------------------------- MODULE Moves -------------------------------
(***************************************************************************)
(* Memory that moves: one page on one device. Clients have it at their     *)
(* addresses by leases. A bracket pins the page, and makes its client map  *)
(* the page's current memory. To take memory back, the daemon first makes  *)
(* every client put a hole in its place (MOVE). Only then does it move the *)
(* bytes to pinned memory, or bring them home. docs/dev/adr/0016 says the  *)
(* same in prose.                                                          *)
(*                                                                         *)
(* There are two bytes: the device's programs store into byte 1, CPU       *)
(* programs write byte 2. The value of a byte is the number of its stores  *)
(* so far, so it shows which stores a copy has.                            *)
(***************************************************************************)
EXTENDS Naturals, FiniteSets, Sequences, TLC

CONSTANTS Clients,
          Most,      \* stores into a byte
          Missing    \* the cures that are left out

Has(cure) == cure \notin Missing

(* Memories are numbered by generations: a page that moves, or is made anew, is in a new generation. A memory that the
   page has left may belong to another file, or be cleared. *)
Tiers == {"none", "device", "pinned"}

VARIABLES
    place,      \* [tier, gen]: where the page is
    last,       \* the last generation
    mem,        \* the bytes of the page's memory
    home,       \* home's bytes
    base,       \* byte 1 when the device last agreed with home: a difference is an unreleased store
    pending,    \* byte 1 has a release that is not home
    given,      \* given[c]: the generation that the daemon told client c to map, 0: a hole
    has,        \* has[c]: the generation that the client has at its addresses
    asked,      \* asked[c]: MOVEs on their way to the client, in order
    open,       \* clients in a bracket
    grants,     \* clients whose bracket pins the page, and that have no answer yet
    taker,      \* the daemon's step: "idle", "holes" while it waits for them, "checked", "emptied" once home has
                \* the page's bytes
    stored, written, released,  \* how often
    wrong       \* a store was lost, or went into another program's memory
vars == <<place, last, mem, home, base, pending, given, has, asked, open, grants, taker, stored, written, released,
          wrong>>

Init ==
    /\ place = [tier |-> "none", gen |-> 0] /\ last = 0
    /\ mem = <<0, 0>> /\ home = <<0, 0>> /\ base = 0 /\ pending = FALSE
    /\ given = [c \in Clients |-> 0] /\ has = [c \in Clients |-> 0] /\ asked = [c \in Clients |-> <<>>]
    /\ open = {} /\ grants = {} /\ taker = "idle"
    /\ stored = 0 /\ written = 0 /\ released = 0 /\ wrong = FALSE

Pinned == open \cup grants # {}
Sure(c) == asked[c] = <<>>
Leased == \E c \in Clients : given[c] # 0 \/ ~Sure(c)

(* A client asks for a bracket: it pins the page, which is made and filled if it has no memory. *)
Use(c) ==
    /\ c \notin open \cup grants
    /\ \/ /\ place.tier # "none"
          /\ UNCHANGED <<place, last, mem, base>>
       \/ /\ place.tier = "none"
          /\ \E t \in {"device", "pinned"} : place' = [tier |-> t, gen |-> last + 1]
          /\ last' = last + 1 /\ mem' = home /\ base' = home[1]
    /\ grants' = grants \cup {c}
    /\ UNCHANGED <<home, pending, given, has, asked, open, taker, stored, written, released, wrong>>

(* The daemon tells the client to map the page's memory, unless the client has it. *)
Give(c) ==
    /\ c \in grants /\ given[c] # place.gen
    /\ asked' = [asked EXCEPT ![c] = Append(@, place.gen)]
    /\ given' = [given EXCEPT ![c] = place.gen]
    /\ UNCHANGED <<place, last, mem, home, base, pending, has, open, grants, taker, stored, written, released, wrong>>

(* The bracket begins once the client has answered. *)
Begin(c) ==
    /\ c \in grants /\ given[c] = place.gen /\ (Sure(c) \/ ~Has("wait-for-map"))
    /\ grants' = grants \ {c} /\ open' = open \cup {c}
    /\ UNCHANGED <<place, last, mem, home, base, pending, given, has, asked, taker, stored, written, released, wrong>>

(* The client carries out the first MOVE. 0 is a hole. *)
Follow(c) ==
    /\ asked[c] # <<>>
    /\ has' = [has EXCEPT ![c] = Head(asked[c])]
    /\ asked' = [asked EXCEPT ![c] = Tail(@)]
    /\ UNCHANGED <<place, last, mem, home, base, pending, given, open, grants, taker, stored, written, released, wrong>>

(* A program stores within its bracket, into the memory at its addresses. *)
Store(c) ==
    /\ c \in open /\ stored < Most
    /\ stored' = stored + 1
    /\ IF has[c] = place.gen THEN mem' = [mem EXCEPT ![1] = stored'] /\ UNCHANGED wrong
                             ELSE wrong' = TRUE /\ UNCHANGED mem
    /\ UNCHANGED <<place, last, home, base, pending, given, has, asked, open, grants, taker, written, released>>

Done(c) ==
    /\ c \in open /\ open' = open \ {c}
    /\ UNCHANGED <<place, last, mem, home, base, pending, given, has, asked, grants, taker, stored, written, released,
              wrong>>

(* A client ends, in any state: its addresses are gone, and its end releases. *)
End(c) ==
    /\ open' = open \ {c} /\ grants' = grants \ {c}
    /\ given' = [given EXCEPT ![c] = 0] /\ has' = [has EXCEPT ![c] = 0] /\ asked' = [asked EXCEPT ![c] = <<>>]
    /\ IF place.tier # "none" /\ mem[1] # base THEN pending' = TRUE /\ released' = stored
                                                ELSE UNCHANGED <<pending, released>>
    /\ UNCHANGED <<place, last, mem, home, base, taker, stored, written, wrong>>

Release ==
    /\ place.tier # "none" /\ mem[1] # base
    /\ pending' = TRUE /\ released' = stored
    /\ UNCHANGED <<place, last, mem, home, base, given, has, asked, open, grants, taker, stored, written, wrong>>

(* Released bytes come home, merged with the CPU's writes. A collect carries everything stored so far. *)
Collected == /\ home' = [home EXCEPT ![1] = mem[1]] /\ base' = mem[1] /\ pending' = FALSE
Collect ==
    /\ pending /\ place.tier # "none" /\ Collected
    /\ UNCHANGED <<place, last, mem, given, has, asked, open, grants, taker, stored, written, released, wrong>>

(* A CPU program writes byte 2: pending bytes come home first. *)
Write ==
    /\ written < Most /\ ~pending
    /\ written' = written + 1 /\ home' = [home EXCEPT ![2] = written']
    /\ UNCHANGED <<place, last, mem, base, pending, given, has, asked, open, grants, taker, stored, released, wrong>>

(* An acquire patches the CPU's writes into the device's memory. *)
Acquire ==
    /\ place.tier # "none" /\ mem[2] # home[2]
    /\ mem' = [mem EXCEPT ![2] = home[2]]
    /\ UNCHANGED <<place, last, home, base, pending, given, has, asked, open, grants, taker, stored, written, released,
              wrong>>

(* The daemon wants the memory back: it tells each client with a lease to put a hole there. *)
TakeBack ==
    /\ taker = "idle" /\ place.tier # "none" /\ ~Pinned
    /\ asked' = [c \in Clients |-> IF given[c] # 0 /\ Has("holes") THEN Append(asked[c], 0) ELSE asked[c]]
    /\ given' = [c \in Clients |-> IF Has("holes") THEN 0 ELSE given[c]]
    /\ taker' = "holes"
    /\ UNCHANGED <<place, last, mem, home, base, pending, has, open, grants, stored, written, released, wrong>>

(* All clients have answered. Brackets may have begun and ended in between. *)
Holes ==
    /\ taker = "holes" /\ \A c \in Clients : Sure(c)
    /\ taker' = "checked"
    /\ UNCHANGED <<place, last, mem, home, base, pending, given, has, asked, open, grants, stored, written, released,
              wrong>>

(* A client that does not answer keeps its memory. *)
GiveUp == /\ taker # "idle" /\ taker' = "idle"
          /\ UNCHANGED <<place, last, mem, home, base, pending, given, has, asked, open, grants, stored, written,
                    released, wrong>>

Free == (~Has("pins") \/ ~Pinned) /\ (~Has("no-leases") \/ ~Has("holes") \/ ~Leased)

(* The bytes move to the other tier, under the file's lock. A mutant copies the bytes from before the last collect. *)
Move ==
    /\ taker = "checked" /\ Free
    /\ place' = [tier |-> IF place.tier = "device" THEN "pinned" ELSE "device", gen |-> last + 1] /\ last' = last + 1
    /\ mem' = IF Has("copy-current") \/ ~pending THEN mem ELSE [mem EXCEPT ![1] = base]
    /\ taker' = "idle"
    /\ UNCHANGED <<home, base, pending, given, has, asked, open, grants, stored, written, released, wrong>>

(* Before the page goes, its unreleased stores are released and come home. The file's lock is free for a while then. *)
Empty ==
    /\ taker = "checked" /\ Free /\ Has("dirty")
    /\ Collected /\ released' = IF mem[1] # base THEN stored ELSE released
    /\ taker' = "settled"
    /\ UNCHANGED <<place, last, mem, given, has, asked, open, grants, stored, written, wrong>>

(* So the daemon checks again for new brackets. Releases by the end of a client come home here too. *)
Evict ==
    /\ taker = (IF Has("dirty") THEN "settled" ELSE "checked") /\ Free
    /\ home' = IF pending THEN [home EXCEPT ![1] = mem[1]] ELSE home
    /\ base' = 0 /\ pending' = FALSE
    /\ place' = [tier |-> "none", gen |-> 0] /\ mem' = <<0, 0>> /\ taker' = "idle"
    /\ UNCHANGED <<last, given, has, asked, open, grants, stored, written, released, wrong>>

Next == \/ \E c \in Clients : Use(c) \/ Give(c) \/ Begin(c) \/ Follow(c) \/ Store(c) \/ Done(c) \/ End(c)
        \/ Release \/ Collect \/ Write \/ Acquire \/ TakeBack \/ Holes \/ GiveUp \/ Move \/ Empty \/ Evict
Spec == Init /\ [][Next]_vars

CONSTANT MostGenerations
Bounded == last <= MostGenerations /\ \A c \in Clients : asked[c] = <<>> \/ Tail(asked[c]) = <<>>
          \/ Tail(Tail(asked[c])) = <<>>

(* Invariants. *)
NobodyStoresElsewhere == ~wrong                                      \* a program in a bracket has the page's memory
NoStoreIsLost == (IF place.tier = "none" THEN home[1] ELSE mem[1]) = stored \/ wrong
ReleasedIsSeen == (IF pending THEN mem[1] ELSE home[1]) >= released  \* by whoever reads on the CPU
WrittenIsHome == home[2] = written
NobodyHasOthersMemory == \A c \in Clients : has[c] \in {0, place.gen}   \* also outside of brackets
InBracketsIsMapped == \A c \in open : has[c] = place.gen
=============================================================================
