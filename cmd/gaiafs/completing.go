package main

import (
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// choices matches the type of a flag that takes one of several words: all|host. N stands for a number.
var choices = regexp.MustCompile(`^[A-Za-z-]+(\|[A-Za-z-]+)+$`)

// completeChoices makes shells complete flags whose help names their words. A number begins with 0.
func completeChoices(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		completeChoices(sub)
	}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		kind, _ := pflag.UnquoteUsage(f)
		if _, has := cmd.GetFlagCompletionFunc(f.Name); has || !choices.MatchString(kind) {
			return
		}
		words := strings.Split(kind, "|")
		for i, w := range words {
			if w == "N" {
				words[i] = "0"
			}
		}
		// It fails only for flags that do not exist or are completed already.
		_ = cmd.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
	})
}
