// Package plot draws charts as SVG, to stand inside an HTML page.
//
// A chart is a value that says what is shown, and a method SVG that draws it. Colours are classes (c0, c1, …, and those
// of verdicts), which the page's style sheet gives: so the charts follow it where it is dark. Every mark has a title,
// which browsers show under the pointer.
//
// The package knows nothing of what is measured.
package plot
