/* Each thread's last failure, and the note of its last success. */
#include "internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last[GAIAFS_MAX_TEXT + 1], note[GAIAFS_MAX_TEXT + 1];

int gaiafs_failed(struct gaiafs_fail *f, int errnum, const char *format, ...)
{
	va_list args;

	f->errnum = errnum > 0 ? errnum : EIO;
	va_start(args, format);
	if (vsnprintf(f->text, sizeof f->text, format, args) < 0)
		f->text[0] = '\0';
	va_end(args);
	return f->errnum;
}

void gaiafs_report(int err, const struct gaiafs_fail *f)
{
	note[0] = '\0';
	if (err == 0) {
		if (f != NULL && f->errnum == 0)
			memcpy(note, f->text, sizeof note);
		return;
	}
	memcpy(last, f->text, sizeof last);
	last[sizeof last - 1] = '\0';
	errno = f->errnum;
}

const char *gaia_error(void)
{
	return last;
}

const char *gaia_note(void)
{
	return note;
}
