------------------------------- MODULE Views -------------------------------
(***************************************************************************)
(* One page of a view, concurrent with a device that releases it, CPU      *)
(* programs that read it, collects, and programs that set the file's times *)
(* in SOURCE. An acquire decides in one step, under File.mu, where the     *)
(* page comes from: straight from the device, from home, or it is not      *)
(* stale. Then it reads home without the lock. It shows every release that *)
(* returned before it began. docs/dev/adr/0018 says the same in prose.     *)
(*                                                                         *)
(* The bytes of the page are the number of their release. An acquire has   *)
(* other pages, too: it may go on while this page is not coming.           *)
(***************************************************************************)
EXTENDS Naturals, TLC

CONSTANTS Most,      \* releases
          Missing

Has(cure) == cure \notin Missing

VARIABLES
    rel,        \* the device's bytes, all released
    pend,       \* home does not have them
    fly,        \* the bytes of a flight, or 0: home has them, and the backing file does not
    file,       \* the backing file
    doubt,      \* the page may have changed in SOURCE
    view,       \* the view's bytes
    straight,   \* the release that the view copied straight from the device
    stale,      \* the view's state, as package view has it
    coming,
    got,        \* what a read of home for the view got: "none", "claimed", or bytes
    acquire,    \* "idle", "begun", "reading"
    want,       \* what it must show
    bad         \* an acquire showed older bytes
vars == <<rel, pend, fly, file, doubt, view, straight, stale, coming, got, acquire, want, bad>>

Init == /\ rel = 0 /\ pend = FALSE /\ fly = 0 /\ file = 0 /\ doubt = FALSE
        /\ view = 0 /\ straight = 0 /\ stale = TRUE /\ coming = FALSE /\ got = <<"none", 0>>
        /\ acquire = "idle" /\ want = 0 /\ bad = FALSE

Release == /\ rel < Most /\ rel' = rel + 1 /\ pend' = TRUE
           /\ UNCHANGED <<fly, file, doubt, view, straight, stale, coming, got, acquire, want, bad>>
(* A change of the backing file marks the page after the change. *)
Collect == /\ pend /\ file' = rel /\ fly' = 0 /\ pend' = FALSE /\ doubt' = FALSE /\ stale' = TRUE
           /\ UNCHANGED <<rel, view, straight, coming, got, acquire, want, bad>>
(* A CPU program reads what was released. *)
Fly == /\ pend /\ fly' = rel /\ pend' = FALSE /\ doubt' = FALSE
       /\ UNCHANGED <<rel, file, view, straight, stale, coming, got, acquire, want, bad>>
Land == /\ fly # 0 /\ file' = fly /\ fly' = 0 /\ stale' = (stale \/ Has("mark-landed"))
        /\ UNCHANGED <<rel, pend, doubt, view, straight, coming, got, acquire, want, bad>>
(* The times in SOURCE are set: any byte may have changed. *)
Times == /\ doubt' = TRUE /\ stale' = TRUE
         /\ UNCHANGED <<rel, pend, fly, file, view, straight, coming, got, acquire, want, bad>>
Settle == /\ doubt /\ doubt' = FALSE
          /\ UNCHANGED <<rel, pend, fly, file, view, straight, stale, coming, got, acquire, want, bad>>

Evict == /\ acquire = "idle" /\ view' = 0 /\ stale' = TRUE
         /\ UNCHANGED <<rel, pend, fly, file, doubt, straight, coming, got, acquire, want, bad>>
Begin == /\ acquire = "idle" /\ acquire' = "begun" /\ want' = rel
         /\ UNCHANGED <<rel, pend, fly, file, doubt, view, straight, stale, coming, got, bad>>
(* Flights land. What was released is copied straight from the device if the page is not in doubt, else collected. *)
Plan ==
    LET lands == fly # 0 /\ Has("land-first")
        old == stale \/ lands
    IN  /\ acquire = "begun" /\ acquire' = "reading"
        /\ stale' = FALSE
        /\ fly' = IF lands \/ (pend /\ doubt) THEN 0 ELSE fly
        /\ CASE pend /\ ~doubt -> /\ view' = IF old \/ straight # rel THEN rel ELSE view
                                  /\ straight' = rel /\ coming' = FALSE /\ UNCHANGED <<pend, doubt>>
                                  /\ file' = IF lands THEN fly ELSE file
             [] pend /\ doubt -> /\ file' = rel /\ pend' = FALSE /\ doubt' = FALSE /\ coming' = TRUE
                                 /\ UNCHANGED <<view, straight>>
             [] OTHER -> /\ coming' = old /\ file' = (IF lands THEN fly ELSE file)
                         /\ UNCHANGED <<view, straight, pend, doubt>>
        /\ UNCHANGED <<rel, got, want, bad>>
(* The collect of another page finds a change in SOURCE, after this one was to be copied straight. *)
PlanInVain == /\ acquire = "begun" /\ pend /\ ~doubt /\ ~Has("look-again-for-straight")
              /\ doubt' = TRUE /\ coming' = TRUE /\ stale' = FALSE /\ acquire' = "reading"
              /\ UNCHANGED <<rel, pend, fly, file, view, straight, got, want, bad>>

(* A reader of home, for this view or another one, claims the page, reads, and brings it. *)
Claim == /\ acquire = "reading" /\ got[1] = "none" /\ (coming \/ (stale /\ ~Has("claim-planned")))
         /\ got' = <<"claimed", 0>> /\ coming' = TRUE /\ stale' = (stale /\ Has("claim-planned"))
         /\ UNCHANGED <<rel, pend, fly, file, doubt, view, straight, acquire, want, bad>>
Read == /\ got[1] = "claimed" /\ got' = <<"read", file>>
        /\ UNCHANGED <<rel, pend, fly, file, doubt, view, straight, stale, coming, acquire, want, bad>>
Arrive == /\ got[1] = "read" /\ view' = got[2] /\ coming' = FALSE /\ got' = <<"none", 0>>
          /\ UNCHANGED <<rel, pend, fly, file, doubt, straight, stale, acquire, want, bad>>
End == /\ acquire = "reading" /\ ~coming /\ acquire' = "idle" /\ bad' = (bad \/ view < want)
       /\ UNCHANGED <<rel, pend, fly, file, doubt, view, straight, stale, coming, got, want>>

Next == \/ Release \/ Collect \/ Fly \/ Land \/ Times \/ Settle
        \/ Evict \/ Begin \/ Plan \/ PlanInVain \/ Claim \/ Read \/ Arrive \/ End
Spec == Init /\ [][Next]_vars

(* Invariants. *)
ShowsReleases == ~bad
(* A view that is not stale has what the backing file has, unless the next plan finds a release or a flight. *)
StaleIsKnown == acquire = "idle" /\ ~stale /\ ~pend /\ fly = 0 => view = file
=============================================================================
