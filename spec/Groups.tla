------------------------------- MODULE Groups -------------------------------
(***************************************************************************)
(* Groups: pages of several files that are released at once. A writer      *)
(* begins, which first brings home earlier releases of the pages. It       *)
(* stores, and then releases one file after the other, or is killed.       *)
(* Readers acquire: they have all of a version or nothing of it, and are   *)
(* told which one. docs/dev/adr/0015 says the same in prose.               *)
(*                                                                         *)
(* Each file has one page, whose bytes are the number of their version.    *)
(* CPU programs may write another byte of the page at the same time, which *)
(* collects pending bytes.                                                 *)
(***************************************************************************)
EXTENDS Naturals, FiniteSets, Sequences, TLC

CONSTANTS Files,     \* numbers from 1: the order in which they are published
          Readers,
          Most,      \* versions
          Missing

Has(cure) == cure \notin Missing

VARIABLES
    group,      \* "none", "collecting", "open", "publishing", "draining"
    next,       \* the version that the group stores
    mem,        \* mem[f]: the bytes of the writer's device
    base,       \* base[f]: the bytes that it agreed on with home, which an abort restores
    home,       \* home[f]
    pending,    \* files with a release that is not home
    left,       \* files that the group still has to publish
    version,    \* version[f]: the version that readers of a file are told
    marked,     \* files that are being published
    cache,      \* cache[f]: the kernel's copy of home, which a release drops
    reader,     \* reader[r]: [at, got, before, told], at: files that are still to be read, "idle" as a set with 0
    bad         \* a reader had a part of a version, or was told a version that it does not have
vars == <<group, next, mem, base, home, pending, left, version, marked, cache, reader, bad>>

Idle == [at |-> {0}, got |-> [f \in Files |-> 0], before |-> 0, told |-> 0]
State(f) == 2 * version[f] + (IF f \in marked THEN 1 ELSE 0)
RECURSIVE SumOf(_)
SumOf(F) == IF F = {} THEN 0 ELSE LET f == CHOOSE f \in F : TRUE IN State(f) + SumOf(F \ {f})
Sum == SumOf(Files)
Newest == CHOOSE v \in {version[f] : f \in Files} : \A f \in Files : version[f] <= v

Init ==
    /\ group = "none" /\ next = 1 /\ left = {} /\ marked = {} /\ pending = {} /\ bad = FALSE
    /\ mem = [f \in Files |-> 0] /\ base = mem /\ home = mem /\ version = mem /\ cache = mem
    /\ reader = [r \in Readers |-> Idle]

Collected(F) == /\ home' = [f \in Files |-> IF f \in F THEN mem[f] ELSE home[f]]
                /\ base' = [f \in Files |-> IF f \in F THEN mem[f] ELSE base[f]]
                /\ pending' = pending \ F

Begin == /\ group = "none" /\ next <= Most
         /\ group' = IF Has("collect-first") THEN "collecting" ELSE "open"
         /\ UNCHANGED <<next, mem, base, home, pending, left, version, marked, cache, reader, bad>>
Collecting == /\ group = "collecting" /\ pending = {} /\ group' = "open"
              /\ UNCHANGED <<next, mem, base, home, pending, left, version, marked, cache, reader, bad>>
Store(f) == /\ group = "open" /\ mem' = [mem EXCEPT ![f] = next]
            /\ UNCHANGED <<group, next, base, home, pending, left, version, marked, cache, reader, bad>>

(* Another program on the device releases, or an fsync does: pages of the group are left out. *)
Neighbour(f) == /\ group = "open" /\ ~Has("grouped") /\ mem[f] # base[f] /\ pending' = pending \cup {f}
                /\ UNCHANGED <<group, next, mem, base, home, left, version, marked, cache, reader, bad>>

(* A collect: by write-back, a CPU program's write or read, or an acquire. *)
Collect(f) == /\ f \in pending /\ Collected({f})
              /\ UNCHANGED <<group, next, mem, left, version, marked, cache, reader, bad>>

Abort == /\ group = "open"
         /\ mem' = IF Has("take-back-group") THEN base ELSE mem
         /\ pending' = IF Has("take-back-group") THEN pending ELSE Files   \* the writer's end releases
         /\ group' = "none"
         /\ UNCHANGED <<next, base, home, left, version, marked, cache, reader, bad>>

(* The release begins after all stores. It marks the files, unless it has to wait for an acquire. *)
Release == /\ group = "open" /\ \A f \in Files : mem[f] = next
           /\ group' = "publishing" /\ left' = Files
           /\ marked' = IF Has("mark") THEN Files ELSE {}
           /\ UNCHANGED <<next, mem, base, home, pending, version, cache, reader, bad>>
Publish(f) == /\ group = "publishing" /\ f \in left /\ \A g \in left : f <= g
              /\ pending' = pending \cup {f} /\ left' = left \ {f}
              /\ group' = IF left = {f} THEN "draining" ELSE group
              /\ UNCHANGED <<next, mem, base, home, version, marked, cache, reader, bad>>
End == /\ group = "draining" /\ \A f \in Files : cache[f] = next \/ ~Has("drain")
       /\ group' = "none" /\ next' = next + 1
       /\ version' = [f \in Files |-> next] /\ marked' = {}
       /\ UNCHANGED <<mem, base, home, pending, left, cache, reader, bad>>
(* The kernel drops its page. The next read fetches it. *)
Drop(f) == /\ group = "draining" /\ cache' = [cache EXCEPT ![f] = IF f \in pending THEN mem[f] ELSE home[f]]
           /\ UNCHANGED <<group, next, mem, base, home, pending, left, version, marked, reader, bad>>

(* An acquire begins when no group of its files is being published. *)
Start(r) == /\ reader[r].at = {0} /\ marked = {}
            /\ LET new == [at |-> Files, got |-> [f \in Files |-> 0], before |-> Sum, told |-> Newest] IN
               reader' = [reader EXCEPT ![r] = new]
            /\ UNCHANGED <<group, next, mem, base, home, pending, left, version, marked, cache, bad>>
(* It brings one file after the other: from home, or released bytes directly from the device. *)
Bring(r, f) == /\ f \in reader[r].at
               /\ reader' = [reader EXCEPT ![r].at = @ \ {f}, ![r].got[f] = IF f \in pending THEN mem[f] ELSE home[f]]
               /\ UNCHANGED <<group, next, mem, base, home, pending, left, version, marked, cache, bad>>
(* It ends if no group was published in between; otherwise it begins anew. *)
Over(r) == /\ reader[r].at = {}
           /\ LET again == Has("look-again") /\ Sum # reader[r].before IN
              /\ bad' = (bad \/ (~again /\ \E f \in Files : reader[r].got[f] # reader[r].told))
              /\ reader' = [reader EXCEPT ![r] = Idle]
           /\ UNCHANGED <<group, next, mem, base, home, pending, left, version, marked, cache>>

Next == \/ Begin \/ Collecting \/ Abort \/ Release \/ End
        \/ \E f \in Files : Store(f) \/ Neighbour(f) \/ Collect(f) \/ Publish(f) \/ Drop(f)
        \/ \E r \in Readers : Start(r) \/ Over(r) \/ \E f \in Files : Bring(r, f)
Spec == Init /\ [][Next]_vars

(* Invariants. *)
AllOrNothing == ~bad
(* While no group is being published, every acquire gets the versions that it is told. *)
VersionsAreTrue == marked = {} /\ group \in {"none", "open", "settling"} =>
                       \A f \in Files : (IF f \in pending THEN mem[f] ELSE home[f]) = version[f]
KernelIsCurrent == marked = {} => \A f \in Files : cache[f] = version[f]   \* what a read on the CPU gets
OnePublication == marked = {} => \A f, g \in Files : version[f] = version[g]
=============================================================================
