// Package ratchet holds the test that keeps gaiafs from growing where it is too large already. It has no code.
//
// testdata/table.txt has a row per figure: what is measured, of what, how much is allowed, and the goal. The test fails
// if more is measured than the table allows. It also fails if clearly less is measured: then
//
//	go test ./internal/ratchet -update
//
// lowers the row. -update never raises one, so the table only goes downwards. A row that has to go up, because a type
// got another name for example, is edited by hand, and the commit says why.
//
// # What is measured
//
//	fields    the fields of a type with more than three methods. An embedded field counts as one. A type with fewer
//	          methods only keeps data, such as counters, and may have more fields
//	methods   the methods of a type or an interface
//	settings  the settings of gaiafs mount: flags that may also be in a configuration file
//	lines     lines of product code, with comments and blank lines, as wc -l counts them. Tests, packages that support
//	          tests, and the benchmarks do not count
//	up        references that run up: pairs of files of one package. The first file uses something that the second
//	          declares, and comes before it in the order of files. The order is in the package's doc.go, under the
//	          heading "Files, from bottom to top"
//
// A type needs rows only if it has more than 20 fields or 40 methods. So in a package without rows, the largest type
// has at most that. Fields and methods may fall 2 % below their rows before the test asks for -update, so that two
// people who work on one type need not change the same row.
//
// Lines are counted per package, to the nearest hundred, and in total. Only the total is a limit. A package may grow by
// more than 200 lines if -update records that and the total is still within its row. The total may fall 2,000 lines
// below its row before the test asks for -update. It then becomes the next multiple of 500.
package ratchet
