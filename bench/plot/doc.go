// Package plot draws charts as SVG for an HTML page.
//
// A chart is a value that says what to show, with a method SVG that draws it. Colours are classes (c0, c1, …, and those
// of verdicts) that the page's style sheet defines, so charts follow the page's dark mode. Every mark has a title,
// which browsers show under the pointer.
//
// The package knows nothing about the measurements.
package plot
