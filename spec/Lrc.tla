-------------------------------- MODULE Lrc --------------------------------
(***************************************************************************)
(* The protocol of package lrc, with the actions of its caller, the kernel *)
(* and the programs. Each action names its rule in docs/consistency.md.    *)
(*                                                                         *)
(* The protocol asks only two questions of a version vector: has the       *)
(* device released bytes that home lacks (pend), and has home bytes that   *)
(* the device lacks (stale)? So this module keeps only the two answers.    *)
(*                                                                         *)
(* A digest stands for the bytes that it was taken of (agreed).            *)
(***************************************************************************)
EXTENDS History

CONSTANTS
    WriteBack,  \* the kernel caches writes, so it may hold pages that it never read
    Mapped,     \* every device maps every page for writing from the beginning, and has acquired it
    Does,       \* what happens in this instance, by name
    Missing,    \* the cures that are taken out: {} but for mutants
    MaxLevel    \* the most steps of a history, for an instance that is too large to be checked whole

VARIABLES
    size,   \* size[p]: bytes of page p before end of file
    pg,     \* pg[p]: everything else of page p
    map,    \* map[d]: "none", "ro", "rw", or "leaving" while its last release is under way
    slot,   \* slot[s]: a release that is under way
    plan,   \* the open plan under the file's lock
    lost,   \* devices that were lost
    hist    \* history, for the refinement: hist of Clients

vars == <<size, pg, map, slot, plan, lost, hist>>

Has(cure) == cure \notin Missing
May_(event) == event \in Does

----------------------------------------------------------------------------
(* Pages *)

AtHome == 0                          \* the base is home itself
Copies == 1..Cardinality(Devices) + 1   \* the base is a copy with this number
Zeros == Cardinality(Devices) + 2    \* the base is zeros: home's bytes were never brought there

AllZero == TLCEval([i \in 1..B |-> 0])
None == <<>>

NotHeld == [held |-> FALSE, tracked |-> FALSE, base |-> AtHome, pend |-> FALSE, stale |-> FALSE,
            fetched |-> FALSE, data |-> AllZero, agreed |-> AllZero]
NewReplica == [NotHeld EXCEPT !.held = TRUE, !.tracked = TRUE, !.fetched = TRUE]

NewPage == [home |-> AllZero,
            may  |-> TRUE,    \* the kernel may hold the page, as far as the daemon knows
            kern |-> [have |-> FALSE, dirty |-> FALSE, data |-> AllZero],
            rep  |-> TLCEval([d \in Devices |-> IF Mapped THEN NewReplica ELSE NotHeld]),
            kept |-> TLCEval([b \in Copies |-> None])]

Tracks(S, d) == S.rep[d].held /\ S.rep[d].tracked
Users(S, b) == {d \in Devices : Tracks(S, d) /\ S.rep[d].base = b}
FreeCopy(S) == CHOOSE b \in Copies : Users(S, b) = {} /\ \A c \in Copies : c < b => Users(S, c) # {}
Pending(S) == {d \in Devices : S.rep[d].held /\ S.rep[d].pend}
Lowest(ds) == CHOOSE d \in ds : \A e \in ds : d <= e
Highest(ds) == CHOOSE d \in ds : \A e \in ds : d >= e
First(ds) == IF Has("lowest first") THEN Lowest(ds) ELSE Highest(ds)   \* the first of several pending devices

(* The bytes of a device's base. If a mutant lost them, home is used. *)
BaseOf(S, d) == LET b == S.rep[d].base
                IN  CASE b = AtHome -> S.home
                      [] b = Zeros -> AllZero
                      [] OTHER -> IF S.kept[b] = None THEN S.home ELSE S.kept[b]

(* Drops copies that are no replica's base. A page that no device holds costs nothing. *)
Swept(S) == [S EXCEPT !.kept = TLCEval([b \in Copies |-> IF Users(S, b) = {} THEN None ELSE S.kept[b]]),
                      !.may = S.may \/ \A d \in Devices : ~S.rep[d].held]

(* Rule 4: before home changes, its bytes are kept for replicas whose base is home. *)
KeepsFor(S, except) == {d \in Devices \ {except} : Tracks(S, d) /\ S.rep[d].base = AtHome}
Kept(S, except) ==
    LET ds == KeepsFor(S, except)
        b == FreeCopy(S)
    IN  IF ds = {} \/ ~Has("keep bases") THEN S
        ELSE [S EXCEPT !.rep = TLCEval([d \in Devices |-> IF d \in ds THEN [S.rep[d] EXCEPT !.base = b] ELSE S.rep[d]]),
                       !.kept[b] = S.home]

(* Rule 3: the bytes that a device changed, otherwise home's. *)
Merged(S, d, mine, n) ==
    LET base == BaseOf(S, d)
        whole == S.rep[d].base = AtHome \/ (~Has("merge by bytes") /\ \E i \in 1..n : mine[i] # base[i])
    IN  TLCEval([i \in 1..B |-> IF i <= n /\ (whole \/ mine[i] # base[i]) THEN mine[i] ELSE S.home[i]])

(* Rule 3: the bytes mine, read from device d, are home. now is what the device has at that time. *)
Collected(S, d, mine, now, n) ==
    LET home == Merged(S, d, mine, n)
        agrees == \A i \in 1..n : home[i] = mine[i]
        joins == agrees \/ ~Has("differ")
        after == IF Has("agree on what was read") THEN mine ELSE now
        b == FreeCopy(S)
        mineAfter == [S.rep[d] EXCEPT !.pend = FALSE,
                                      !.stale = IF joins THEN FALSE ELSE @,
                                      !.base = IF ~Has("base moves") THEN @ ELSE IF joins THEN AtHome ELSE b,
                                      !.agreed = after]
    IN  Swept([S EXCEPT !.home = home,
                        !.rep = TLCEval([e \in Devices |-> IF e = d THEN mineAfter
                                                   ELSE [S.rep[e] EXCEPT !.stale = S.rep[e].held]]),
                        !.kept[b] = after])

RECURSIVE CollectedAll(_, _)
CollectedAll(S, n) ==
    IF Pending(S) = {} THEN S
    ELSE LET d == First(Pending(S))
         IN  CollectedAll(Collected(Kept(S, d), d, S.rep[d].data, S.rep[d].data, n), n)

(* Rules 4 and 5: home was changed by a CPU program or by the kernel. *)
CPUChanged(S, home, held) ==
    [S EXCEPT !.home = home, !.may = @ \/ held,
              !.rep = TLCEval([d \in Devices |-> [S.rep[d] EXCEPT !.stale = S.rep[d].held /\ (Has("writes count")
                        \/ @)]])]

(* Rule 5: bring one replica up to date. *)
Updated(S, d, track) ==
    LET r == S.rep[d]
        base == BaseOf(S, d)
        patch == r.tracked /\ Has("patch")
        data == TLCEval([i \in 1..B |-> IF ~patch \/ (S.home[i] # base[i] /\ r.data[i] = base[i]) THEN S.home[i]
                  ELSE r.data[i]])
    IN  IF r.held /\ ~r.stale THEN S
        ELSE Swept([S EXCEPT !.rep[d] = [r EXCEPT !.held = TRUE, !.stale = FALSE, !.base = AtHome,
                                                  !.tracked = @ \/ track, !.data = data, !.agreed = S.home]])

(* A program may store from now on. The device's bytes are the base of its stores. *)
Tracked(S, d) == IF S.rep[d].held /\ ~S.rep[d].tracked /\ ~S.rep[d].stale
                 THEN [S EXCEPT !.rep[d].tracked = TRUE, !.rep[d].agreed = S.rep[d].data] ELSE S

(* The device does not hold the page any more. Its memory keeps its bytes. *)
Evicted(S, d) == Swept([S EXCEPT !.rep[d] = [NotHeld EXCEPT !.data = S.rep[d].data]])
Zeroed(S, d) == IF Has("memory is zeroed") THEN [S EXCEPT !.rep[d].data = AllZero] ELSE S

(* Rule 9: a program may store into memory that home's bytes were never brought to. *)
Hollow(S, d) ==
    IF S.rep[d].held THEN S
    ELSE [S EXCEPT !.rep[d] = [NotHeld EXCEPT !.held = TRUE, !.tracked = Has("watch hollow"), !.stale = TRUE,
              !.data = S.rep[d].data,
                                              !.base = IF Has("watch hollow") THEN Zeros ELSE AtHome]]

(* Bytes of a page become zero everywhere: in replicas and in their bases. *)
ZeroedBytes(S, Z) ==
    LET zero(bytes) == TLCEval([i \in 1..B |-> IF i \in Z THEN 0 ELSE bytes[i]])
    IN  IF ~Has("zero what grows") THEN S
        ELSE [S EXCEPT !.rep = TLCEval([d \in Devices |-> [S.rep[d] EXCEPT !.data = zero(@), !.agreed = zero(@)]]),
                       !.kept = TLCEval([b \in Copies |-> IF S.kept[b] = None THEN None ELSE zero(S.kept[b])])]

----------------------------------------------------------------------------
(* The file *)

NoRelease == [on |-> FALSE, dev |-> 0, pages |-> {}, drops |-> {}, left |-> {}, waits |-> {}, leaves |-> FALSE]
NoPlan == [kind |-> "none", p |-> 0, d |-> 0, bytes |-> {}, data |-> AllZero, kept |-> {}]

Draining(p) == \E s \in Slots : p \in slot[s].drops
DrainingFor(p, except) == \E s \in Slots \ {except} : p \in slot[s].drops
Free == plan = NoPlan   \* the file's lock

Writer(d) == map[d] \in {"rw"}
CanStore(d) == map[d] = "rw" /\ d \notin lost

(* Collects, except pages that lrc's Pending leaves out. *)
Home(p, entering) ==
    IF Draining(p) /\ Has("leave draining pages") /\ ~(entering /\ Has("collect for the kernel")) THEN pg[p]
    ELSE CollectedAll(pg[p], size[p])

(* The values that a byte has anywhere. A new store gets another value. *)
InUse(p, i) ==
    hist[p][i].live \cup {pg[p].home[i], pg[p].kern.data[i]}
    \cup UNION {{pg[p].rep[d].data[i], pg[p].rep[d].agreed[i]} : d \in Devices}
    \cup {pg[p].kept[b][i] : b \in {c \in Copies : pg[p].kept[c] # None}}
    \cup (IF plan.kind = "collect" /\ plan.p = p THEN {plan.data[i]} ELSE {})
    \cup (IF plan.kind = "write" /\ plan.p = p /\ i \in plan.bytes THEN {plan.data[i]} ELSE {})
    \cup (IF plan.kind = "write back" /\ plan.p = p THEN {plan.data[i]} ELSE {})
Unused(p, I) == {v \in Ids : \A i \in I : v \notin InUse(p, i)}
HasUnused(p, I) == Unused(p, I) # {}
NewValue(p, I) == Lowest(Unused(p, I))

Remember(p, I, Op(_)) ==
    hist' = [hist EXCEPT ![p] = TLCEval([i \in 1..B |-> IF i \in I THEN Tidy(Op(hist[p][i])) ELSE hist[p][i]])]
RememberStore(a, p, I, v) == LET Op(h) == Stored(h, a, v) IN Remember(p, I, Op)

SetPage(p, S) == pg' = [pg EXCEPT ![p] = S]
SetReplicas(d, Op(_)) == pg' = TLCEval([p \in Pages |-> Op(pg[p])])

Init ==
    /\ size = TLCEval([p \in Pages |-> B])
    /\ pg = TLCEval([p \in Pages |-> NewPage])
    /\ map = TLCEval([d \in Devices |-> IF Mapped THEN "rw" ELSE "none"])
    /\ slot = TLCEval([s \in Slots |-> NoRelease])
    /\ plan = NoPlan
    /\ lost = {}
    /\ hist = TLCEval([p \in Pages |-> TLCEval([i \in 1..B |-> NewByte])])

----------------------------------------------------------------------------
(* Programs of devices *)

(* A program of a device stores into its memory. The daemon does not notice. *)
DeviceStores(d, p, i) ==
    /\ May_("store") /\ CanStore(d) /\ (i <= size[p] \/ May_("store past end"))
    /\ HasUnused(p, {i})
    /\ LET v == NewValue(p, {i})
       IN  /\ SetPage(p, [pg[p] EXCEPT !.rep[d].data[i] = v])
           /\ IF i <= size[p] THEN RememberStore(d, p, {i}, v) ELSE UNCHANGED hist
    /\ UNCHANGED <<size, map, slot, plan, lost>>

(* Rule 9: a program maps the file. The bytes that it can read are current or zero, and its stores will be found. *)
Exposed(S, p, d, writes, used) ==
    LET r == S.rep[d]
        fresh == CASE ~r.held \/ ~r.stale -> S
                   [] r.tracked /\ r.base = Zeros -> S
                   [] r.tracked \/ used -> Updated(IF Draining(p) THEN S ELSE CollectedAll(S, size[p]), d, FALSE)
                   [] OTHER -> Zeroed(Evicted(S, d), d)
        zeroed == IF fresh.rep[d].held THEN fresh ELSE Zeroed(fresh, d)
    IN  IF writes THEN Hollow(Tracked(zeroed, d), d) ELSE zeroed
Map(d, how) ==
    /\ May_("map") /\ Free /\ d \notin lost
    /\ \/ map[d] = "none" /\ how \in {"ro", "rw"}
       \/ map[d] = "ro" /\ how = "rw"
    /\ map' = [map EXCEPT ![d] = how]
    /\ pg' = TLCEval([p \in Pages |-> Exposed(pg[p], p, d, how = "rw", map[d] # "none")])
    /\ UNCHANGED <<size, slot, plan, lost, hist>>

(* A program that only reads unmaps the file. *)
Unmap(d) ==
    /\ May_("map") /\ Free /\ map[d] = "ro"
    /\ map' = [map EXCEPT ![d] = "none"]
    /\ pg' = TLCEval([p \in Pages |-> [pg[p] EXCEPT !.rep[d].fetched = FALSE]])
    /\ UNCHANGED <<size, slot, plan, lost, hist>>

(* Rule 5: a program acquires a page. The kernel's dirty pages went home first (BeginWriteBack). *)
Acquire(d, p) ==
    /\ May_("acquire") /\ Free /\ map[d] \in {"ro", "rw"} /\ d \notin lost
    /\ pg[p].kern.dirty => ~Has("flush the kernel's pages")
    /\ LET S == IF Has("acquire collects") THEN Home(p, FALSE) ELSE pg[p]
           U == Updated(S, d, Writer(d))
           T == IF Writer(d) THEN Tracked(U, d) ELSE U
       IN  SetPage(p, [T EXCEPT !.rep[d].fetched = TRUE])
    /\ LET Op(h) == Acquired(h, d) IN Remember(p, 1..B, Op)
    /\ UNCHANGED <<size, map, slot, plan, lost>>

----------------------------------------------------------------------------
(* Releases *)

Modified(S, d, n) == Tracks(S, d) /\ \E i \in 1..n : S.rep[d].data[i] # S.rep[d].agreed[i]

(* Rule 2: publishes the pages of P that the device modified. The kernel has to drop those that it may hold. With
   leaves, the program unmapped the file, or died, which is a release of the whole file. *)
CommitRelease(s, d, P, leaves) ==
    /\ May_("release") /\ Free /\ ~slot[s].on /\ map[d] = "rw" /\ d \notin lost
    /\ \A t \in Slots : t < s => slot[t].on
    /\ leaves => May_("map") /\ P = Pages
    /\ LET mod == {p \in P : Modified(pg[p], d, size[p])}
           first(p) == IF WriteBack /\ Has("collect before a release") THEN Home(p, FALSE) ELSE pg[p]
           drops == IF Has("drop the kernel's pages") THEN {p \in mod : pg[p].may
                     \/ (WriteBack /\ Has("drop unread pages"))}
                    ELSE {}
       IN  /\ pg' = TLCEval([p \in Pages |-> IF p \in mod
                                     THEN [first(p) EXCEPT !.may = FALSE,
                                                           !.rep[d].pend = Has("count releases")
                                                                     \/ first(p).rep[d].pend]
                                     ELSE pg[p]])
           /\ slot' = [slot EXCEPT ![s] = [on |-> TRUE, dev |-> d, pages |-> P, drops |-> drops, left |-> drops,
                                           waits |-> IF drops # {} \/ ~Has("wait for other releases") THEN {}
                                                     ELSE {t \in Slots \ {s} : slot[t].drops \cap P # {}},
                                           leaves |-> leaves]]
    /\ map' = IF leaves THEN [map EXCEPT ![d] = "leaving"] ELSE map
    /\ hist' = TLCEval([p \in Pages |-> TLCEval([i \in 1..B |-> IF p \in P THEN Tidy(Published(hist[p][i], s, d))
              ELSE hist[p][i]])])
    /\ UNCHANGED <<size, plan, lost>>

(* Rule 2: the kernel drops a page of a release. A dirty one goes home first (BeginWriteBack). *)
Drop(s, p) ==
    /\ p \in slot[s].left /\ ~pg[p].kern.dirty
    /\ ~(plan.kind \in {"write", "write back"} /\ plan.p = p)   \* the kernel has the page locked
    /\ SetPage(p, [pg[p] EXCEPT !.kern = [have |-> FALSE, dirty |-> FALSE, data |-> AllZero]])
    /\ slot' = [slot EXCEPT ![s].left = @ \ {p}]
    /\ UNCHANGED <<size, map, plan, lost, hist>>

(* Rule 6: the pages of a release have drained. Those that a program wrote whole meanwhile are dropped again; when there
   are none, the release waits for others that drain its pages. Those that wait for this one go on waiting while it
   drops theirs again. *)
Dropped(s) ==
    /\ Free /\ slot[s].on /\ slot[s].drops # {} /\ slot[s].left = {}
    /\ LET again == IF ~Has("drop again") THEN {}
                    ELSE {p \in slot[s].pages : pg[p].may /\ Pending(pg[p]) # {} /\ ~DrainingFor(p, s)}
       IN  /\ slot' = TLCEval([t \in Slots |->
                 IF t = s
                 THEN [slot[s] EXCEPT !.drops = again, !.left = again,
                                      !.waits = IF again # {} \/ ~Has("wait for other releases") THEN {}
                                                ELSE {u \in Slots \ {s} : slot[u].drops \cap slot[s].pages # {}}]
                 ELSE [slot[t] EXCEPT !.waits = IF again \cap slot[t].pages = {} \/ ~Has("wait for later drains")
                           THEN @ \ {s}
                                                ELSE @]])
           /\ pg' = TLCEval([p \in Pages |-> IF p \in again THEN [pg[p] EXCEPT !.may = FALSE] ELSE pg[p]])
    /\ UNCHANGED <<size, map, plan, lost, hist>>

(* Rule 2: the release returns. Everybody may know of it. *)
Finish(s) ==
    /\ slot[s].on /\ slot[s].drops = {} /\ slot[s].waits = {}
    /\ LET d == slot[s].dev
       IN  IF slot[s].leaves
           THEN /\ Free
                /\ map' = [map EXCEPT ![d] = "none"]
                /\ pg' = TLCEval([p \in Pages |-> [pg[p] EXCEPT !.rep[d].fetched = FALSE]])
           ELSE UNCHANGED <<map, pg>>
    /\ slot' = [slot EXCEPT ![s] = NoRelease]
    /\ hist' = TLCEval([p \in Pages |-> TLCEval([i \in 1..B |-> Tidy(Finished(hist[p][i], s))])])
    /\ UNCHANGED <<size, plan, lost>>

----------------------------------------------------------------------------
(* Collects, and what pages of a device become *)

(* Rule 3: a device's page is read, to be brought home, and home is kept for others. *)
BeginCollect(p) ==
    /\ May_("collect") /\ Free /\ Pending(pg[p]) # {}
    /\ Draining(p) => ~Has("leave draining pages")
    /\ LET d == First(Pending(pg[p]))
       IN  /\ plan' = [NoPlan EXCEPT !.kind = "collect", !.p = p, !.d = d, !.data = pg[p].rep[d].data,
                 !.kept = KeepsFor(pg[p], d)]
           /\ SetPage(p, Kept(pg[p], d))
    /\ UNCHANGED <<size, map, slot, lost, hist>>

CommitCollect ==
    /\ plan.kind = "collect"
    /\ LET p == plan.p IN SetPage(p, Collected(pg[p], plan.d, plan.data, pg[p].rep[plan.d].data, size[p]))
    /\ plan' = NoPlan
    /\ UNCHANGED <<size, map, slot, lost, hist>>

(* Home has not changed: it is the base again of the replicas for which it was kept. *)
NotKept(S, ds) == IF ~Has("take back what was kept") THEN [S EXCEPT !.kept = TLCEval([b \in Copies |-> IF Users(S,
          b) \subseteq ds THEN None ELSE S.kept[b]])]
                  ELSE Swept([S EXCEPT !.rep = TLCEval([d \in Devices |-> IF d \in ds
                            THEN [S.rep[d] EXCEPT !.base = AtHome] ELSE S.rep[d]])])

(* Home does not take the bytes, or cannot be read. They stay pending. *)
Abort ==
    /\ May_("abort") /\ plan.kind \in {"collect", "write"}
    /\ SetPage(plan.p, NotKept(pg[plan.p], plan.kept))
    /\ plan' = NoPlan
    /\ UNCHANGED <<size, map, slot, lost, hist>>

(* A device gives up a page that nobody maps: rule 3 first. *)
Evict(d, p) ==
    /\ May_("evict") /\ Free /\ map[d] = "none" /\ pg[p].rep[d].held
    /\ Draining(p) => ~Has("evict no draining page")
    /\ LET S == IF Has("evict collects") THEN Home(p, FALSE) ELSE pg[p]
       IN  SetPage(p, Evicted(S, d))
    /\ UNCHANGED <<size, map, slot, plan, lost, hist>>

(* A program does not need a page for now (MADV_DONTNEED). Its stores since its release stay. *)
GiveUp(d, p) ==
    /\ May_("give up") /\ Free /\ map[d] \in {"ro", "rw"} /\ pg[p].rep[d].held /\ ~Draining(p) /\ d \notin lost
    /\ LET S == Home(p, FALSE)
           E == Zeroed(Evicted(S, d), d)
       IN  IF Modified(S, d, size[p]) \/ S.rep[d].pend THEN SetPage(p, S)
           ELSE SetPage(p, IF Writer(d) THEN Hollow(E, d) ELSE E)
    /\ UNCHANGED <<size, map, slot, plan, lost, hist>>

(* No program maps a page for writing any more: no base is kept for it. *)
Untrack(d, p) ==
    /\ May_("untrack") /\ Free /\ map[d] \in {"none", "ro"} /\ Tracks(pg[p], d)
    /\ pg[p].rep[d].pend => ~Has("track what is pending")
    /\ LET S == pg[p]
       IN  SetPage(p, IF S.rep[d].base = Zeros THEN Evicted(S, d)
                      ELSE Swept([S EXCEPT !.rep[d].tracked = FALSE, !.rep[d].base = AtHome]))
    /\ UNCHANGED <<size, map, slot, plan, lost, hist>>

(* A device is lost, with all bytes that only it had. *)
Lose(d) ==
    /\ Cardinality(lost) < MaxLosses /\ Free /\ d \notin lost
    /\ lost' = lost \cup {d}
    /\ map' = [map EXCEPT ![d] = "none"]
    /\ LET after(p) == [Evicted(pg[p], d) EXCEPT !.rep[d].data = AllZero]
           held(p) == {e \in Devices : after(p).rep[e].held}
           left(p, i) == {after(p).home[i]} \cup (IF after(p).kern.have THEN {after(p).kern.data[i]} ELSE {})
                         \cup UNION {{after(p).rep[e].data[i], after(p).rep[e].agreed[i]} : e \in held(p)}
                         \cup {after(p).kept[b][i] : b \in {c \in Copies : after(p).kept[c] # None}}
       IN  /\ pg' = TLCEval([p \in Pages |-> after(p)])
           /\ hist' = TLCEval([p \in Pages |-> TLCEval([i \in 1..B |->
                           Without(hist[p][i], Losable(hist[p][i], d) \ left(p, i))])])
    /\ slot' = TLCEval([s \in Slots |-> IF slot[s].dev = d THEN [slot[s] EXCEPT !.leaves = FALSE] ELSE slot[s]])
    /\ UNCHANGED <<size, plan>>

----------------------------------------------------------------------------
(* Programs on the CPU, and the kernel *)

(* Rule 7: the kernel reads a page that it has no copy of, also while the page drains (rule 6). *)
KernelReads(p) ==
    /\ May_("read") /\ Free /\ ~pg[p].kern.have /\ size[p] > 0
    /\ LET S == Home(p, TRUE)
       IN  SetPage(p, [S EXCEPT !.may = Has("note reads") \/ @, !.kern = [have |-> TRUE, dirty |-> FALSE,
                 data |-> S.home]])
    /\ UNCHANGED <<size, map, slot, plan, lost, hist>>

(* The kernel forgets a clean page at any time, without telling the daemon. *)
KernelForgets(p) ==
    /\ May_("forget") /\ pg[p].kern.have /\ ~pg[p].kern.dirty
    /\ ~(plan.kind \in {"write", "write back"} /\ plan.p = p)
    /\ SetPage(p, [pg[p] EXCEPT !.kern = [have |-> FALSE, dirty |-> FALSE, data |-> AllZero]])
    /\ UNCHANGED <<size, map, slot, plan, lost, hist>>

(* A program on the CPU stores through its mapping of the file into the kernel's copy. *)
MapStores(p, i) ==
    /\ May_("map store") /\ pg[p].kern.have /\ i <= size[p] /\ HasUnused(p, {i})
    /\ LET v == NewValue(p, {i})
       IN  /\ SetPage(p, [pg[p] EXCEPT !.kern.dirty = TRUE, !.kern.data[i] = v])
           /\ RememberStore(CPU, p, {i}, v)
    /\ UNCHANGED <<size, map, slot, plan, lost>>

(* Rule 4: a program on the CPU writes some bytes of a page, or all of it. Released bytes come home first. *)
BeginWrite(p, I) ==
    /\ May_("write") /\ ~WriteBack /\ Free /\ HasUnused(p, I)
    /\ \E n \in I : \A i \in I : i <= n /\ n <= size[p] + 1 /\ (n > size[p] => May_("grow"))
    /\ LET S == IF Has("write collects") THEN Home(p, FALSE) ELSE pg[p]
       IN  /\ SetPage(p, Kept(S, CPU))
           /\ plan' = [NoPlan EXCEPT !.kind = "write", !.p = p, !.bytes = I, !.kept = KeepsFor(S, CPU),
                                     !.data = TLCEval([i \in 1..B |-> IF i \in I THEN NewValue(p, I) ELSE 0])]
    /\ UNCHANGED <<size, map, slot, lost, hist>>

CommitWrite ==
    /\ plan.kind = "write"
    /\ LET p == plan.p
           I == plan.bytes
           last == CHOOSE n \in I : \A i \in I : i <= n
           grows == last > size[p]
           S == IF grows THEN ZeroedBytes(pg[p], size[p] + 1..last) ELSE pg[p]
           put(bytes) == TLCEval([i \in 1..B |-> IF i \in I THEN plan.data[i] ELSE bytes[i]])
           whole == I = 1..B
           have == S.kern.have \/ whole
           C == CPUChanged(S, put(S.home), whole)
       IN  /\ SetPage(p, IF have THEN [C EXCEPT !.kern.have = TRUE, !.kern.data = put(S.kern.data)] ELSE C)
           /\ size' = IF grows THEN [size EXCEPT ![p] = last] ELSE size
           /\ hist' = [hist EXCEPT ![p] = TLCEval([i \in 1..B |->
                          LET h == IF i > size[p] /\ i <= last THEN NewByte ELSE hist[p][i]
                          IN  IF i \in I THEN Tidy(Stored(h, CPU, plan.data[i])) ELSE h])]
    /\ plan' = NoPlan
    /\ UNCHANGED <<map, slot, lost>>

(* A program writes, and the kernel keeps the bytes for later. It reads the page first unless all of it is written. *)
CachedWrite(p, I) ==
    /\ May_("write") /\ WriteBack /\ HasUnused(p, I) /\ \A i \in I : i <= size[p]
    /\ pg[p].kern.have \/ I = 1..B
    /\ LET v == NewValue(p, I)
       IN  /\ SetPage(p, [pg[p] EXCEPT !.kern = [have |-> TRUE, dirty |-> TRUE,
                                                 data |-> TLCEval([i \in 1..B |-> IF i \in I THEN v ELSE @.data[i]])]])
           /\ RememberStore(CPU, p, I, v)
    /\ UNCHANGED <<size, map, slot, plan, lost>>

(* Rules 4 and 6: the kernel writes a dirty page home, as a whole, old bytes included. *)
BeginWriteBack(p) ==
    /\ Free /\ pg[p].kern.dirty
    /\ LET S == IF Has("write collects") THEN Home(p, FALSE) ELSE pg[p]
       IN  /\ SetPage(p, [Kept(S, CPU) EXCEPT !.kern.dirty = FALSE])
           /\ plan' = [NoPlan EXCEPT !.kind = "write back", !.p = p, !.data = pg[p].kern.data]
    /\ UNCHANGED <<size, map, slot, lost, hist>>

CommitWriteBack ==
    /\ plan.kind = "write back"
    /\ LET p == plan.p
           home == TLCEval([i \in 1..B |-> IF i <= size[p] THEN plan.data[i] ELSE pg[p].home[i]])
       IN  SetPage(p, CPUChanged(pg[p], home, WriteBack))
    /\ plan' = NoPlan
    /\ UNCHANGED <<size, map, slot, lost, hist>>

(* fsync returns: nothing is dirty, and nothing is pending. *)
Sync(p) ==
    /\ May_("sync") /\ Free /\ ~pg[p].kern.dirty /\ ~Draining(p)
    /\ SetPage(p, Home(p, FALSE))
    /\ LET Op(h) == Synced(h) IN Remember(p, 1..B, Op)
    /\ UNCHANGED <<size, map, slot, plan, lost>>

(* A program sets the size. Past the smaller size all replicas have zeros at once. A page that is gone has no pending
   release. *)
Resize(p, n) ==
    /\ May_("resize") /\ Free /\ n # size[p]
    /\ LET Z == {i \in 1..B : i > n \/ i > size[p]}
           cut == n < size[p]
           S == pg[p]
           home == TLCEval([i \in 1..B |-> IF i > n THEN 0 ELSE S.home[i]])
           kern == IF ~cut THEN S.kern
                   ELSE IF n = 0 THEN [have |-> FALSE, dirty |-> FALSE, data |-> AllZero]
                   ELSE [S.kern EXCEPT !.data = TLCEval([i \in 1..B |-> IF i > n THEN 0 ELSE @[i]])]
           agrees(r) == IF cut /\ n = 0 /\ r.held
                        THEN [r EXCEPT !.pend = @ /\ ~Has("cut what is pending"), !.stale = FALSE, !.base = AtHome]
                                  ELSE r
       IN  SetPage(p, Swept(ZeroedBytes([S EXCEPT !.home = home, !.kern = kern,
                                                  !.rep = TLCEval([d \in Devices |-> agrees(S.rep[d])])], Z)))
    /\ size' = [size EXCEPT ![p] = n]
    /\ hist' = [hist EXCEPT ![p] = TLCEval([i \in 1..B |-> IF i > n \/ i > size[p] THEN NewByte ELSE hist[p][i]])]
    /\ UNCHANGED <<map, slot, plan, lost>>

----------------------------------------------------------------------------
Next ==
    \/ \E d \in Devices, p \in Pages, i \in 1..B : DeviceStores(d, p, i)
    \/ \E d \in Devices : Map(d, "ro") \/ Map(d, "rw") \/ Unmap(d) \/ Lose(d)
    \/ \E d \in Devices, p \in Pages : Acquire(d, p) \/ Evict(d, p) \/ GiveUp(d, p) \/ Untrack(d, p)
    \/ \E s \in Slots, d \in Devices, P \in SUBSET Pages \ {{}} : CommitRelease(s, d, P, FALSE)
    \/ \E s \in Slots, d \in Devices : CommitRelease(s, d, Pages, TRUE)
    \/ \E s \in Slots, p \in Pages : Drop(s, p)
    \/ \E s \in Slots : Dropped(s) \/ Finish(s)
    \/ \E p \in Pages : BeginCollect(p) \/ KernelReads(p) \/ KernelForgets(p) \/ BeginWriteBack(p) \/ Sync(p)
    \/ \E p \in Pages, i \in 1..B : MapStores(p, i)
    \/ \E p \in Pages, I \in Parts : BeginWrite(p, I) \/ CachedWrite(p, I)
    \/ \E p \in Pages, n \in 0..B : Resize(p, n)
    \/ CommitCollect \/ Abort \/ CommitWrite \/ CommitWriteBack

Spec == Init /\ [][Next]_vars

----------------------------------------------------------------------------
(* The protocol refines Clients. *)

ReadCached(p, S) == IF S.kern.have THEN S.kern.data ELSE Home(p, TRUE).home
ReadPast(p, S) == LET H == Home(p, FALSE)
                IN  IF ~S.kern.dirty THEN H.home
                    ELSE TLCEval([i \in 1..B |-> IF i <= size[p] THEN S.kern.data[i] ELSE H.home[i]])

(* While a page is written home, its readers wait. *)
Shows == TLCEval([p \in Pages |->
            LET S == pg[p]
                cached == ReadCached(p, S)
                direct == ReadPast(p, S)
                busy == plan.kind = "write back" /\ plan.p = p
            IN  TLCEval([i \in 1..B |-> TLCEval([r \in Readers |->
                    IF i > size[p] THEN Nothing
                    ELSE CASE r = Cache -> IF busy /\ ~S.kern.have THEN Nothing ELSE cached[i]
                           [] r = Past -> IF busy THEN Nothing ELSE direct[i]
                           [] OTHER -> IF S.rep[r].held /\ S.rep[r].fetched /\ map[r] # "leaving" THEN S.rep[r].data[i]
                                     ELSE Nothing])])])

Seen == INSTANCE Clients WITH shows <- Shows
Refines == Seen!Spec

(* The same, as an invariant: quicker to check. *)
SeenAllowed == Seen!Allowed

Bounded == TLCGet("level") < MaxLevel
SamePages == Permutations(Pages)

----------------------------------------------------------------------------
(* Invariants of each page. *)

Replicas == {<<p, d>> \in Pages \X Devices : pg[p].rep[d].held}

(* The states of lrc, as its invariants build tag checks them. *)
StatesAreSane == \A <<p, d>> \in Replicas :
    LET r == pg[p].rep[d]
    IN  /\ r.tracked /\ r.base = AtHome => ~r.stale
        /\ r.tracked /\ r.base = Zeros => r.stale
        /\ r.pend => r.tracked
        /\ ~r.tracked => r.base = AtHome

(* A page past the end of file has no pending release. *)
CutIsVoid == \A p \in Pages : size[p] = 0 => Pending(pg[p]) = {}

(* Every base that a replica needs is kept. *)
BasesAreKept == \A <<p, d>> \in Replicas :
    LET r == pg[p].rep[d]
    IN  r.tracked /\ r.base \in Copies => pg[p].kept[r.base] # None

(* A replica's digest is that of its base: another digest would hide stores, or invent them. *)
DigestsAreOfBases == \A <<p, d>> \in Replicas :
    LET r == pg[p].rep[d]
    IN  r.tracked /\ plan = NoPlan => \A i \in 1..size[p] : r.agreed[i] = BaseOf(pg[p], d)[i]

(* A replica that is up to date, and that no program stores into, equals home. *)
CleanIsHome == \A <<p, d>> \in Replicas :
    LET r == pg[p].rep[d]
    IN  ~r.tracked /\ ~r.stale => \A i \in 1..size[p] : r.data[i] = pg[p].home[i]

(* The replicas of every device that can store are tracked. *)
StoresAreFound == \A <<p, d>> \in Replicas : map[d] = "rw" => Tracks(pg[p], d)

(* Rule 6: the kernel holds no clean page that lacks bytes whose release has drained. *)
KernelIsCurrent == \A p \in Pages :
    pg[p].kern.have /\ ~pg[p].kern.dirty /\ ~Draining(p) /\ plan = NoPlan
        => Pending(pg[p]) = {} /\ \A i \in 1..size[p] : pg[p].kern.data[i] = pg[p].home[i]

(* Rule 3: if releases of several devices come home together, the highest device wins a byte that several changed. *)
HighestWins == \A p \in Pages, i \in 1..B :
    LET changed == {d \in Pending(pg[p]) : pg[p].rep[d].data[i] # BaseOf(pg[p], d)[i]}
    IN  i <= size[p] /\ changed # {} => CollectedAll(pg[p], size[p]).home[i] = pg[p].rep[Highest(changed)].data[i]

(* Rule 3: a device gives up released bytes only when they are home, or when it is lost. *)
NothingIsLost == [][\A p \in Pages, d \in Devices :
    pg[p].rep[d].pend /\ ~pg'[p].rep[d].held /\ d \notin lost'
        => pg'[p].home = CollectedAll(pg[p], size[p]).home]_vars

(* The daemon knows of every page that the kernel may hold. *)
KernelIsKnown == \A p \in Pages :
    pg[p].kern.have /\ ~pg[p].kern.dirty /\ ~Draining(p) /\ plan = NoPlan => pg[p].may \/ WriteBack
=============================================================================
