# SPDX-License-Identifier: Apache-2.0
    # From the first word that is no flag and no value on, all words are another program's.
    while [ "$i" -lt "$COMP_CWORD" ]; do
        case "${COMP_WORDS[i]}" in
        @takes@)
            i=$((i + 1))
            [ "${COMP_WORDS[i]}" != "=" ] || i=$((i + 1))
            ;;
        -*) ;;
        *) return ;;
        esac
        i=$((i + 1))
    done
