# SPDX-License-Identifier: Apache-2.0
@function@() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="" head="" i=1
    COMPREPLY=()
    [ "$COMP_CWORD" -lt 1 ] || prev="${COMP_WORDS[COMP_CWORD - 1]}"
    # bash takes --flag=value for three words, zsh for one.
    if [ "$cur" = "=" ]; then
        cur=""
    elif [ "$prev" = "=" ]; then
        prev="${COMP_WORDS[COMP_CWORD - 2]}"
    else
        case "$cur" in --*=*) prev="${cur%%=*}" head="${cur%%=*}=" cur="${cur#*=}" ;; esac
    fi
@border@    case "$prev" in
@values@    @takes@) return ;;
    esac
    case "$cur" in -*) COMPREPLY=($(compgen -W "@flags@" -- "$cur")) ;; esac
}
complete -o default -F @function@ @program@
