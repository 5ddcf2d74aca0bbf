// Command gaiafs mounts a directory so that CPU and GPU programs can write its files together.
//
// # Model
//
// Every subcommand has a file of its own. mount.go reads the settings and either serves the mount in this process
// (serve.go) or starts a process that does (daemon.go). The others are clients of a running mount: they know it by its
// mountpoint, and ask it through the client library as any program would.
//
// Settings come from flags, the environment and configuration files, in this order of precedence (settings.go,
// config.go). Devices are chosen by --gpus from the table in gpus.go.
//
// # Ending a mount
//
// ending.go ends in one order, whatever the reason: what devices released comes home, while the mount is in service;
// clients lose their connections, which releases what they wrote, and that comes home; the mount goes, and with it the
// kernel's dirty pages come home; the devices are closed. While home takes no bytes, none of these steps is made: the
// mount is held (package fs) so that nobody unmounts it, and stays. `gaiafs umount` (umount.go) asks by an END on the
// control socket, unmounts between the first step and the others, and waits on its connection for the last word.
//
// # Exit codes
//
// 0: done. 1: it failed, and the last line on standard error says why and what to do. 2: the command line, the
// environment or a configuration file is wrong.
//
// # What it does not do
//
// It decides nothing about files, pages or devices.
package main
